"""The hash of the sources that a record was made with."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORDS = Path(__file__).resolve().parent / "records"
_ROOMS = ("orchestrator", "conf", "plugins")
_SUFFIXES = {".py", ".yaml", ".toml", ".json"}


def sources_hash(root: Path = ROOT) -> str:
    """Of every file of the package, its configuration and its plugins, tests apart."""
    digest = hashlib.sha256()
    for path in sorted(path for room in _ROOMS for path in (root / room).rglob("*")):
        if path.suffix in _SUFFIXES and not {"tests", "__pycache__"} & set(path.relative_to(root).parts):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def read_records() -> dict[str, dict[str, Any]]:
    """Committed records by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))}


def stale_records() -> list[str]:
    """Names of the records that other sources than the present ones made."""
    now = sources_hash()
    return [name for name, record in read_records().items() if record["sources"] != now]
