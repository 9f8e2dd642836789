"""What a benchmark found, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from orchestrator.bench.measure import Job, Measured, Start, plan_status
from orchestrator.bench.modes import KINDS

Rows = dict[str, list[float]]
"""Row of the table -> seconds, one a start."""


def rows_of(starts: Sequence[Start], bare_s: Sequence[float] = ()) -> Rows:
    """Intervals and stages in the order of the runs, then when the engine was ready, the record's total, and the whole
    process, also against the bare import of the same round."""
    rows: Rows = {}
    for start in starts:
        for name, seconds in _intervals(start.record).items():
            rows.setdefault(name, []).append(seconds)
    rows["ready"] = [start.record["ready_s"] for start in starts if start.record["ready_s"] is not None]
    rows["total"] = [start.record["total_s"] for start in starts]
    rows["process"] = [start.process_s for start in starts]
    rows["process above bare import"] = [start.process_s - bare for start, bare in zip(starts, bare_s, strict=False)]
    return {name: seconds for name, seconds in rows.items() if seconds}


def _intervals(record: Mapping[str, Any]) -> dict[str, float]:
    """Those that make up the run; what ran beside others is not among them."""
    found = [(span["start_s"], span["name"], span["wall_s"]) for span in record["spans"] if span.get("beside") is None]
    found += [
        (stage["start_s"], stage["slot"], stage["wall_s"] or 0.0)
        for stage in record["stages"]
        if stage["start_s"] is not None
    ]
    return {name: seconds for _, name, seconds in sorted(found)}


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """Median and range; `spread` is the range as a share of the median."""
    middle, low, high = median(seconds), min(seconds), max(seconds)
    spread = (high - low) / middle if middle else 0.0
    return {"median": middle, "min": low, "max": high, "spread": spread, "all": list(seconds)}


def columns(measured: Measured) -> dict[str, Rows]:
    """A column a mode, then the bare imports and the other engine's marks."""
    found = {name: rows_of(starts, measured.bare_s) for name, starts in measured.starts.items()}
    return found | {"bare import": {"process": measured.bare_s}} | ({"other": measured.marks} if measured.marks else {})


def table(job: Job, measured: Measured) -> str:
    """Medians, with the range behind each, a column a mode."""
    shown = columns(measured)
    names = list(dict.fromkeys(name for rows in shown.values() for name in rows))
    # The last rows sum up, also where a mode has intervals that an earlier one has not.
    last = [
        name for name in ("ready", "total", "process", "process above bare import", *measured.marks) if name in names
    ]
    names = [name for name in names if name not in last] + last
    cells = {title: [_cell(rows.get(name)) for name in names] for title, rows in shown.items()}
    width = max(len(name) for name in names)
    widths = {title: max(len(title), *(len(cell) for cell in column)) for title, column in cells.items()}
    lines = [f"{job.count} rounds: {' '.join(job.overrides) or 'the default'}"]
    lines.append("  ".join([f"{'median s (range)':<{width}}", *(f"{title:>{widths[title]}}" for title in cells)]))
    for index, name in enumerate(names):
        row = (f"{column[index]:>{widths[title]}}" for title, column in cells.items())
        lines.append("  ".join([f"{name:<{width}}", *row]).rstrip())
    return "\n".join([*lines, *(f"note: {line}" for line in measured.notes)])


def _cell(seconds: Sequence[float] | None) -> str:
    if not seconds:
        return "-"
    spread = f" ({min(seconds):.3f} to {max(seconds):.3f})" if len(seconds) > 1 else ""
    return f"{median(seconds):.3f}{spread}"


def as_json(job: Job, measured: Measured, *, records: bool) -> dict[str, Any]:
    """Everything; with `records`, also what each start said of itself."""
    any_start = next(starts[0] for starts in measured.starts.values() if starts)
    modes = {
        mode.name: {
            "is": KINDS[mode.kind] + ("; the weights' files are not in the page cache" if mode.is_cold else ""),
            "summary": {
                name: summary(seconds) for name, seconds in rows_of(measured.starts[mode.name], measured.bare_s).items()
            },
            "startup_plan": [plan_status(start.record) for start in measured.starts[mode.name]],
            "beside": [_beside(start.record) for start in measured.starts[mode.name]],
            **({"records": [start.record for start in measured.starts[mode.name]]} if records else {}),
        }
        for mode in job.modes
    }
    return {
        "overrides": list(job.overrides),
        "rounds": job.count,
        "modes": modes,
        "bare_import": summary(measured.bare_s),
        "other": None
        if job.other is None
        else {
            "command": job.other.command,
            "marks": {
                name: {"pattern": job.other.marks[name].pattern, **summary(seconds)}
                for name, seconds in measured.marks.items()
            },
        },
        "versions": any_start.record["versions"],
        "device": any_start.record["device"],
        "notes": measured.notes,
    }


def _beside(record: Mapping[str, Any]) -> dict[str, float]:
    return {span["name"]: span["wall_s"] for span in record["spans"] if span.get("beside") is not None}
