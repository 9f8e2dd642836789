"""The files of a model folder, each by its size and a hash: what tells one model from another in a record."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

_SMALL = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")
_WEIGHTS = ".safetensors"


def model_files(folder: Path) -> dict[str, dict[str, Any]]:
    """By name: `bytes`, and the SHA-256 of the whole file; for weights, which are large, of their header alone, which
    has the name, type, shape and place of every tensor."""
    return {
        path.name: _described(path)
        for path in sorted(folder.iterdir())
        if path.suffix in (*_SMALL, _WEIGHTS) and path.is_file()
    }


def _described(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    with path.open("rb") as file:
        if path.suffix != _WEIGHTS:
            return {"bytes": size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
        length = file.read(8)
        # A file that is cut off may say anything.
        header = file.read(min(int.from_bytes(length, "little"), size))
        return {"bytes": size, "header_sha256": hashlib.sha256(length + header).hexdigest()}
