"""The number that a sweeper which searches gets from a point: a start that ended well, and how much it was."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.errors import Problem
from orchestrator.records import RunRecord


def objective(config: Mapping[str, Any], swept: Sequence[str], record: RunRecord | None) -> float:
    """What a start that ended well counts: the value of the setting that was searched, if it is one and a number, so
    that the greatest that works is found; otherwise the tokens of KV cache that it got."""
    value = _at(config, swept[0]) if len(swept) == 1 else None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return float(record.kv_cache.num_tokens) if record is not None and record.kv_cache is not None else 0.0


def worst(direction: Any) -> float:
    """What a start that failed counts; `direction` is the sweeper's, a text or an enumeration's member."""
    return -math.inf if is_maximised(direction) else math.inf


def is_maximised(direction: Any) -> bool:
    return _named(direction) == "maximize"


def problem_with(direction: Any) -> Problem | None:
    """What is wrong with a sweeper's direction, if it has one."""
    if direction is None or _named(direction) in ("minimize", "maximize"):
        return None
    return Problem("hydra.sweeper.direction", "a start has one number; minimize or maximize works", str(direction))


def _named(direction: Any) -> str:
    return str(getattr(direction, "name", direction))


def _at(config: Mapping[str, Any], path: str) -> Any:
    node: Any = config
    for key in path.lstrip("+").split("."):
        node = node.get(key) if isinstance(node, Mapping) else None
    return node
