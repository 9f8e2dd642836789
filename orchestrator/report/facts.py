"""What a record says, in the order in which it is read: where the time went, what holds the memory, what stopped it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.memory.ledger import ACCOUNTS
from orchestrator.records import ErrorRecord, RunRecord, StageRecord
from orchestrator.report.layout import one_line
from orchestrator.units import format_size

# Beyond this share of the run, time that no interval names gets a row of its own.
_NAMED_ENOUGH = 0.999
# A start imports dozens of packages; most take a share below this.
_WORTH_A_ROW = 0.01


@dataclass(frozen=True)
class Interval:
    """A stage or a named part of the run, with its parts (name, seconds).

    Attributes:
        wall_s: None for a stage that did not run.
        beside: the interval that it ran beside; its seconds then count twice.
    """

    name: str
    start_s: float | None
    wall_s: float | None
    note: str = ""
    beside: str | None = None
    parts: tuple[tuple[str, float], ...] = field(default=())


def intervals(record: RunRecord) -> list[Interval]:
    """The top-level intervals by their start, stages that did not run among them, then what no interval names."""
    found = [
        Interval(span.name, span.start_s, span.wall_s, _beside(span.beside), span.beside, _imports(record, span.name))
        for span in record.spans
    ]
    if record.import_s > 0 and not any("import" in span.name for span in record.spans):
        found.append(Interval("imports", None, record.import_s, parts=_imports(record, "imports")))
    found += [_of_stage(stage) for stage in record.stages]
    # The sort is stable: a stage that did not run stays behind the last one that did, or behind everything.
    begun = [stage.start_s for stage in record.stages if stage.start_s is not None]
    last_start = max(begun or [each.start_s or 0.0 for each in found], default=0.0)
    found.sort(key=lambda each: last_start if each.wall_s is None else each.start_s or 0.0)
    rest = record.total_s - _named_s(found)
    if record.total_s > 0 and rest > (1 - _NAMED_ENOUGH) * record.total_s:
        found.append(Interval("not named", None, rest))
    return found


def _named_s(found: list[Interval]) -> float:
    """Seconds that the union of the intervals covers."""
    covered = sum(each.wall_s or 0.0 for each in found if each.start_s is None)
    end = 0.0
    for each in found:
        if each.start_s is not None and each.wall_s is not None:
            covered += max(0.0, each.start_s + each.wall_s - max(end, each.start_s))
            end = max(end, each.start_s + each.wall_s)
    return covered


def _beside(other: str | None) -> str:
    return f"beside {other}" if other else ""


def _imports(record: RunRecord, name: str) -> tuple[tuple[str, float], ...]:
    """The packages that took long enough to matter, and the sum of the others."""
    if "import" not in name:
        return ()
    shown = [(each.package, each.s) for each in record.imports if each.s >= _WORTH_A_ROW * record.total_s]
    others = len(record.imports) - len(shown)
    rest = sum(each.s for each in record.imports) - sum(s for _, s in shown)
    return (*shown, *([(f"{others} others", rest)] if others else []))


def _of_stage(stage: StageRecord) -> Interval:
    parts = tuple((f"{span.name} {_beside(span.beside)}".rstrip(), span.wall_s) for span in stage.spans)
    return Interval(stage.slot, stage.start_s, stage.wall_s, _stage_note(stage), parts=parts)


def _stage_note(stage: StageRecord) -> str:
    match stage.status:
        case "ok":
            return ""
        case "not_run":
            return "not run"
        case "skipped":
            return f"skipped: {stage.metrics['reason']}" if "reason" in stage.metrics else "skipped"
        case _:
            return f"{stage.status.upper()}: {_sentence(stage.error)}" if stage.error else stage.status.upper()


def _sentence(error: ErrorRecord) -> str:
    return one_line(f"{error.type}: {error.message}")


def stopped_at(record: RunRecord) -> str:
    """Where a run that is not ok ended: `at stage profile_run`, or between which it was."""
    stopped = [stage.slot for stage in record.stages if stage.status in ("failed", "interrupted")]
    ran = [stage.slot for stage in record.stages if stage.status in ("ok", "skipped")]
    if stopped:
        return f"at stage {stopped[0]}"
    return f"after stage {ran[-1]}" if ran else "before the first stage"


def stopped_by(record: RunRecord) -> str:
    """Why a run that is not ok ended, in one line."""
    error = record.error or next((stage.error for stage in record.stages if stage.error), None)
    return _sentence(error) if error else "no reason was recorded"


def util(record: RunRecord) -> float | None:
    """`gpu.util` as configured."""
    gpu = record.config.get("gpu")
    value = gpu.get("util") if isinstance(gpu, Mapping) else None
    return value if isinstance(value, int | float) else None


def model_name(record: RunRecord) -> str:
    model = record.config.get("model")
    return str(model.get("path") or model.get("name") or "") if isinstance(model, Mapping) else ""


def peak_parts(record: RunRecord) -> str:
    """Which part of the profile run set the activation peak, and the peak of each; empty where nothing says so."""
    for stage in record.stages:
        set_by, peaks = stage.metrics.get("set_by"), stage.metrics.get("peaks_bytes")
        if isinstance(set_by, str):
            sizes = peaks.items() if isinstance(peaks, Mapping) else ()
            listed = ", ".join(f"{part} {format_size(int(size))}" for part, size in sizes)
            return f"set by {set_by}" + (f" ({listed})" if listed else "")
    return ""


def accounts(record: RunRecord) -> dict[str, int | None]:
    """The accounts in the ledger's own order, then those that it does not know.

    In a run that did not finish, an account without a charge is one that no stage came to: None.
    """
    if record.ledger is None:
        return {}
    given = record.ledger.accounts
    names = [name for name in ACCOUNTS if name in given] + [name for name in given if name not in ACCOUNTS]
    return {name: given[name] if given[name] or record.status == "ok" else None for name in names}
