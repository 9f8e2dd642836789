"""What came of a run, and what of it came out differently when it was repeated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.records import RunRecord
from orchestrator.rerun.circumstances import ABSENT, Difference
from orchestrator.units import MiB, format_size

_SHARE = 0.01
_SLACK_BYTES = {"rss": 64 * MiB}
_DRIVERS_SLACK_BYTES = 16 * MiB
"""A resident set moves by what else the process does; a driver's reading by its granularity."""


@dataclass(frozen=True)
class Comparison:
    """`same` are the names of what is equal, `unknown` of what one of the runs does not have."""

    same: tuple[str, ...]
    different: tuple[Difference, ...]
    unknown: tuple[str, ...]


def compared(then: RunRecord, now: RunRecord) -> Comparison:
    """Everything but the seconds. Accounts are equal within a hundredth, or within what readings vary by."""
    first, second = _exact(then), _exact(now)
    names = list(dict.fromkeys([*first, *second]))
    same = [name for name in names if first.get(name) == second.get(name)]
    unknown = [name for name in names if name not in first or name not in second]
    different = [
        Difference(name, first[name], second[name]) for name in names if name not in same and name not in unknown
    ]
    accounts = _accounts(then, now)
    if then.ledger is not None and now.ledger is not None and not accounts:
        same.append("accounts")
    return Comparison(tuple(same), (*different, *accounts), tuple(unknown))


def seconds(then: RunRecord, now: RunRecord) -> dict[str, tuple[float, float]]:
    """Of each stage that ran in both, of the imports, until ready and in all: then and now."""
    first, second = _seconds(then), _seconds(now)
    return {name: (value, second[name]) for name, value in first.items() if name in second}


def _exact(record: RunRecord) -> dict[str, str]:
    found: dict[str, str] = {"status": record.status}
    if record.error is not None:
        found["error"] = record.error.type
    if record.kv_cache is not None:
        found["blocks"] = f"{record.kv_cache.num_gpu_blocks:,} of {record.kv_cache.block_size} tokens"
    for stage in record.stages:
        for modality, facts in _mapping(stage.metrics.get("modalities")).items():
            content = _mapping(facts).get("sha256")
            if isinstance(content, str):
                found[f"dummy {modality}"] = content[:16]
        tokens = stage.metrics.get("tokens_sha256")
        if isinstance(tokens, str):
            found[f"tokens of {stage.slot}"] = tokens[:16]
    return found


def _accounts(then: RunRecord, now: RunRecord) -> list[Difference]:
    if then.ledger is None or now.ledger is None:
        return []
    slack = _SLACK_BYTES.get(now.ledger.source, _DRIVERS_SLACK_BYTES)
    first, second = then.ledger.accounts, now.ledger.accounts
    return [
        Difference(f"account {name}", _size(first.get(name)), _size(second.get(name)))
        for name in dict.fromkeys([*first, *second])
        if abs(first.get(name, 0) - second.get(name, 0)) > max(slack, _SHARE * first.get(name, 0))
    ]


def _seconds(record: RunRecord) -> dict[str, float]:
    found = {"imports": record.import_s, **{stage.slot: stage.wall_s for stage in record.stages if stage.wall_s}}
    if record.ready_s is not None:
        found["ready"] = record.ready_s
    return {name: value for name, value in {**found, "total": record.total_s}.items() if value and value > 0}


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _size(value: int | None) -> str:
    return ABSENT if value is None else format_size(value)
