"""The end of a sweep: a line a point, what a search found, and the exit code."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.compose.point import RESULT_NAME, Result
from orchestrator.records import RunRecord, read_record
from orchestrator.report import facts
from orchestrator.report.flat import numbers
from orchestrator.report.layout import Row, Table, render, seconds
from orchestrator.units import format_size

_COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "ready_s": ("ready s", seconds),
    "total_s": ("total s", seconds),
    "kv_cache.num_gpu_blocks": ("blocks", lambda value: f"{value:,}"),
    "kv_cache.num_tokens": ("tokens", lambda value: f"{value:,}"),
    "kv_cache.bytes": ("KV cache", lambda value: format_size(int(value))),
}


@dataclass(frozen=True)
class Finished:
    """A point that ended: its result, where its record lies, and the record if it can be read."""

    result: Result
    folder: Path
    record: RunRecord | None

    @property
    def status(self) -> str:
        if self.result.skipped:
            return "ok, skipped"
        if self.result.exit_code is None and (self.record is None or self.record.status == "ok"):
            return "not ended"
        return self.record.status if self.record is not None and not self.result.remark else "failed"


def finished_points(sweep_dir: Path, sweep: str) -> list[Finished]:
    """The points of `sweep` in their order; the folder may have those of an earlier one too."""
    found = [(path.parent, _result(path)) for path in sweep_dir.rglob(RESULT_NAME)]
    points = [Finished(each, folder, _record(folder)) for folder, each in found if each is not None]
    return sorted((each for each in points if each.result.sweep == sweep), key=lambda each: each.result.number)


def exit_code(points: Sequence[Finished], *, searches: bool) -> int:
    """Of the sweep: 0 if all points ended well, 2 if one cannot work, else 1; of a search, 0 if one ended well."""
    codes = [1 if each.result.exit_code is None else each.result.exit_code for each in points]
    if not any(codes) or (searches and 0 in codes):
        return 0
    return 2 if 2 in codes else 1


def shown(points: Sequence[Finished], sweep_dir: Path, *, swept: Sequence[str], maximised: bool | None) -> str:
    """The table and the closing line.

    Args:
        swept: the settings that have a column each.
        maximised: of a search, whether the greatest is the best; None for a sweep that does not search.
    """
    failed = sum(each.result.exit_code != 0 for each in points)
    skipped = sum(each.result.skipped for each in points)
    count = f"{len(points)} {'point' if len(points) == 1 else 'points'}, {len(points) - failed} ok" + (
        f" ({skipped} skipped)" if skipped else ""
    )
    closing = f"sweep: {count}, {failed} failed, records in {sweep_dir}"
    best = [] if maximised is None or not points else [_best(points, swept, maximised)]
    return "\n".join([*([render(_table(points, swept)), ""] if points else []), *best, closing])


def _best(points: Sequence[Finished], swept: Sequence[str], maximised: bool) -> str:
    good = [each for each in points if each.result.objective is not None]
    if not good:
        return "best: none, every point failed"
    choose = max if maximised else min
    best = choose(good, key=lambda each: each.result.objective or 0.0)
    given = dict(_given(best.result))
    settings = " ".join(f"{name}={given[name]}" for name in swept if name in given)
    return f"best: point {best.folder.name}, {settings}"


def _table(points: Sequence[Finished], swept: Sequence[str]) -> Table:
    found = [numbers(each.record) if each.record is not None and not each.result.remark else {} for each in points]
    columns = [name for name in _COLUMNS if any(name in each for each in found)]
    rows = []
    for each, values in zip(points, found, strict=True):
        given = dict(_given(each.result))
        cells = [each.status, *(given.get(name, "-") for name in swept)]
        cells += [_COLUMNS[name][1](values[name]) if name in values else "-" for name in columns]
        rows.append(Row(each.folder.name, tuple(cells), _remark(each)))
    return Table(("point", "status", *swept, *(_COLUMNS[name][0] for name in columns)), tuple(rows))


def _remark(point: Finished) -> str:
    if point.result.remark or point.record is None:
        return point.result.remark or "it has no record that can be read"
    return "" if point.record.status == "ok" else facts.stopped_by(point.record)


def _given(result: Result) -> list[tuple[str, str]]:
    parts = [text.partition("=") for text in result.overrides]
    return [(name.lstrip("+~"), value) for name, _, value in parts]


def _result(path: Path) -> Result | None:
    try:
        given = json.loads(path.read_text())
        return Result(**{**given, "overrides": tuple(given["overrides"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _record(folder: Path) -> RunRecord | None:
    try:
        return read_record(folder)
    except (OSError, ValueError):
        return None
