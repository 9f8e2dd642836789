"""The hash of the sources that a record was made with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from orchestrator import sources

ROOT = Path(__file__).resolve().parents[2]
RECORDS = Path(__file__).resolve().parent / "records"


def sources_hash(root: Path = ROOT) -> str:
    """Of every file of the package, its configuration and its plugins, tests apart."""
    return sources.sources_hash(root)


def read_records() -> dict[str, dict[str, Any]]:
    """Committed records by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))}


def stale_records() -> list[str]:
    """Names of the records that other sources than the present ones made."""
    now = sources_hash()
    return [name for name, record in read_records().items() if record["sources"] != now]
