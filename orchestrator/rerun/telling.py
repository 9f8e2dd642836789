"""A repetition as text for a person and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.report.layout import Row, Table, render
from orchestrator.rerun.circumstances import Difference
from orchestrator.rerun.results import Comparison


@dataclass(frozen=True)
class Repetition:
    """What was repeated and what came of it.

    Attributes:
        before: what differed before it was started.
        late: what was seen to differ once the device was open and the model here.
        seconds: by name, then and now.
    """

    repeats: str
    run_id: str
    folder: str
    notes: Sequence[str]
    before: Sequence[Difference]
    late: Sequence[Difference]
    results: Comparison
    seconds: Mapping[str, tuple[float, float]]

    @property
    def is_same(self) -> bool:
        return not self.results.different

    def as_json(self) -> dict[str, Any]:
        timed = {
            name: {"then_s": then, "now_s": now, "ratio": now / then} for name, (then, now) in self.seconds.items()
        }
        return {**asdict(self), "is_same": self.is_same, "seconds": timed}


def before_text(repeats: str, notes: Sequence[str], before: Sequence[Difference], unknown: Sequence[str]) -> str:
    lines = [f"repeats {repeats}", *notes]
    lines += [f"not compared, because the record does not say them: {', '.join(unknown)}"] if unknown else []
    if before:
        return "\n".join([*lines, "what differs from then:", _table(before)])
    return "\n".join([*lines, "nothing is known to differ from then"])


def after_text(done: Repetition) -> str:
    parts = [f"what else differs from then:\n{_table(done.late)}"] if done.late else []
    if done.results.different:
        parts.append(f"the results differ:\n{_table(done.results.different)}")
    if done.results.same:
        parts.append(f"the same: {', '.join(done.results.same)}")
    if done.results.unknown:
        parts.append(f"only one of the two runs has: {', '.join(done.results.unknown)}")
    rows = [Row(name, (f"{then:.3f}", f"{now:.3f}", f"{now / then:.2f}")) for name, (then, now) in done.seconds.items()]
    return "\n\n".join([*parts, render(Table(("seconds", "then", "now", "ratio"), tuple(rows)))])


def _table(found: Sequence[Difference]) -> str:
    rows = tuple(Row(each.name, (each.then, each.now)) for each in found)
    return render(Table(("", "then", "now"), rows))
