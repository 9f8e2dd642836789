"""Why there is no plan: what this start has other than the last one that learned of such a model and device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from orchestrator.cache import fingerprint
from orchestrator.cache.index import Index, Row
from orchestrator.cache.layout import read_header
from orchestrator.errors import CacheError

FIRST = "the first start of this model here"
_LETTERS = 16


def digests(parts: Mapping[str, Any]) -> dict[str, str]:
    """Of each part of a fingerprint; the configuration's by node, and one by one what the engine names."""
    flat: dict[str, list[Any]] = {}
    own = {name: part for name, part in parts.items() if name not in ("config", "identity")}
    for group in (own, parts["config"], parts["identity"]):
        for name, part in group.items():
            # An engine of somebody else's may call something as we do.
            flat.setdefault(name, []).append(part)
    return {name: fingerprint({name: part})[:_LETTERS] for name, part in flat.items()}


def why_missing(cache: Path, about: Mapping[str, Any], now: Mapping[str, str]) -> str:
    """
    Args:
        cache: its folder.
        about: what this start's plan would say that it is.
        now: `digests` of this start.
    """
    last = next(_plans(cache / "entries", about), None)
    if last is None:
        return FIRST
    changed = sorted(name for name in now.keys() | last.keys() if now.get(name) != last.get(name))
    return f"other than at the last start: {', '.join(changed)}" if changed else ""


def _plans(folder: Path, about: Mapping[str, Any]) -> Iterator[Mapping[str, str]]:
    """The digests of the plans for such a model and device, the latest first."""
    for row in sorted(Index(folder).rows(), key=lambda row: -row.stored_at):
        meta = _meta(row, folder)
        if meta.get("about") == about and isinstance(meta.get("facts"), dict):
            digests = meta["facts"].get("digests")
            yield digests if isinstance(digests, dict) else {}


def _meta(row: Row, folder: Path) -> dict[str, Any]:
    try:
        file = row.open(folder)
        if file is None:
            return {}
        with file:
            return read_header(file, checked=False).meta
    except CacheError:
        return {}
