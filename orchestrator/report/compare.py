"""Several runs side by side: what was configured differently, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from orchestrator.dotted import leaves
from orchestrator.records import RunRecord
from orchestrator.report import facts
from orchestrator.report.layout import Row, Table, one_line, render, seconds
from orchestrator.units import format_size

# Columns that a terminal of 120 characters has room for.
_RUNS_ABREAST = 4


def compare(records: Sequence[RunRecord]) -> str:
    """All tables as text; more runs than fit side by side follow below."""
    groups = [records[start : start + _RUNS_ABREAST] for start in range(0, len(records), _RUNS_ABREAST)]
    return "\n\n\n".join(
        "\n\n".join(render(table) for table in comparison(group, differing(records))) for group in groups
    )


def comparison(records: Sequence[RunRecord], settings: Sequence[str]) -> list[Table]:
    """What differed (the dotted names in `settings`), seconds, memory and KV cache; a column for each run."""
    tables = [
        Table(("", *(record.run_id for record in records)), (_verdicts(records), *_settings(records, settings))),
        _table("seconds", records, _seconds, seconds, lambda change: f"{change:+.3f}"),
    ]
    if any(record.ledger for record in records):
        tables.append(_table("memory", records, _sizes, _size, _size_change))
    if any(record.kv_cache for record in records):
        tables.append(_table("KV cache", records, _kv, _count, lambda change: f"{change:+,.0f}"))
    return tables


def differing(records: Sequence[RunRecord]) -> list[str]:
    """Dotted names of the settings, versions and devices that are not the same in all runs."""
    flat = [settings_of(record) for record in records]
    names = dict.fromkeys(chain.from_iterable(flat))
    return [name for name in names if any(one.get(name) != flat[0].get(name) for one in flat)]


def settings_of(record: RunRecord) -> dict[str, str]:
    """What a run was given and met: settings, versions and device by their dotted names."""
    device = {name: record.device.get(name) for name in ("kind", "name", "total_bytes")}
    # Where the record went differs in every comparison and tells nothing.
    config = {name: value for name, value in leaves(record.config) if name != "run.dir"}
    met = dict(leaves({"version": record.versions, "device": device}))
    return {name: "null" if value is None else one_line(str(value)) for name, value in (config | met).items()}


def _settings(records: Sequence[RunRecord], names: Sequence[str]) -> list[Row]:
    flat = [settings_of(record) for record in records]
    return [Row(name, tuple(one.get(name, "-") for one in flat)) for name in names]


def _verdicts(records: Sequence[RunRecord]) -> Row:
    shown = (r.status if r.status == "ok" else f"{r.status.upper()} {facts.stopped_at(r)}" for r in records)
    return Row("status", tuple(shown))


def _table(
    title: str,
    records: Sequence[RunRecord],
    numbers: Callable[[RunRecord], Mapping[str, float | None]],
    show: Callable[[float | None], str],
    show_change: Callable[[float], str],
) -> Table:
    """A row for each name that any run has; of two runs, also by how much the second is more."""
    columns = [numbers(record) for record in records]
    rows = []
    for name in _in_order(columns):
        values = [column.get(name) for column in columns]
        cells = [show(value) for value in values]
        if len(values) == 2:
            cells += _change(values[0], values[1], show_change) if cells[0] != cells[1] else ("", "")
        rows.append(Row(name, tuple(cells)))
    change = ("change", "") if len(records) == 2 else ()
    return Table((title, *(record.run_id for record in records), *change), tuple(rows))


def _change(first: float | None, second: float | None, show: Callable[[float], str]) -> tuple[str, str]:
    if first is None or second is None:
        return "", ""
    return show(second - first), f"{100 * (second - first) / first:+.1f} %" if first > 0 else ""


def _in_order(columns: Sequence[Mapping[str, float | None]]) -> list[str]:
    """All names, each after the one that it follows in its own run; totals stay last."""
    names: list[str] = []
    for column in columns:
        at = 0
        for name in column:
            if name in names:
                at = names.index(name) + 1
            else:
                names.insert(at, name)
                at += 1
    return names


def _seconds(record: RunRecord) -> dict[str, float | None]:
    by_name: dict[str, float | None] = {}
    for each in facts.intervals(record):
        by_name[each.name] = (by_name.get(each.name) or 0.0) + each.wall_s if each.wall_s is not None else None
    return by_name | {"total": record.total_s, "ready": record.ready_s}


def _sizes(record: RunRecord) -> Mapping[str, float | None]:
    ledger = record.ledger
    if ledger is None:
        return {}
    return facts.accounts(record) | {
        "residual": ledger.residual_bytes,
        "unused": ledger.unused_bytes,
        "requested": ledger.requested_bytes,
        "other processes": ledger.other_processes_bytes,
        "total": ledger.total_bytes,
        "peak held": ledger.peak_held_bytes,
    }


def _kv(record: RunRecord) -> dict[str, float | None]:
    kv = record.kv_cache
    if kv is None:
        return {}
    return {"blocks": kv.num_gpu_blocks, "block size": kv.block_size, "tokens": kv.num_tokens}


def _size(value: float | None) -> str:
    return "-" if value is None else format_size(int(value))


def _size_change(change: float) -> str:
    return f"{'+' if change > 0 else ''}{format_size(int(change))}"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
