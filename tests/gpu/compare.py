"""What was predicted beside what was measured, against the goals.

python -m tests.gpu.compare [--predictions FOLDER] [--measured FOLDER] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.report.layout import Row, Table, render
from orchestrator.units import MiB
from tests.gpu.points import MEASURED, MODELS, PREDICTIONS, TEXT_MODELS, read

ALLOCATED, RESERVED = 0.005, 0.03
"""How far a peak may be from what was measured, as a share of that: of live tensors, of what the allocator took."""
PAGE = 2 * MiB
"""In which the allocator takes memory: no peak of it can be told more exactly."""
OUTSIDE = 64 * MiB
"""How far context, libraries and graphs may be."""
BLOCKS = 128
"""How far the KV cache may be, in blocks."""


@dataclass(frozen=True)
class Compared:
    """One quantity of one point; `allowed` is how far it may be, in its own unit."""

    model: str
    point: str
    quantity: str
    predicted: int
    measured: int
    allowed: float

    @property
    def difference(self) -> int:
        return self.predicted - self.measured

    @property
    def ok(self) -> bool:
        return abs(self.difference) <= self.allowed

    def shown(self, value: float) -> str:
        return f"{value:,.0f}" if self.quantity == "KV blocks" else f"{value / MiB:,.1f} MiB"


def compared(model: str, point: str, predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> Iterator[Compared]:
    """The quantities of a point that the goals name, the parts of the peak one by one."""

    def one(quantity: str, values: tuple[int, int], allowed: float) -> Compared:
        return Compared(model, point, quantity, *values, allowed)

    def share(quantity: str, values: tuple[int, int], part: float) -> Compared:
        return one(quantity, values, max(part * values[1], PAGE if part == RESERVED else 0))

    def account(name: str) -> tuple[int, int]:
        return predicted["ledger"]["accounts"][name], measured["ledger"]["accounts"][name]

    yield one("weights", account("weights"), 0)
    for name, kind, goal in (("allocated_bytes", "allocated", ALLOCATED), ("peaks_bytes", "reserved", RESERVED)):
        said, found = (each["metrics"]["profile_run"][name] for each in (predicted, measured))
        for part, size in found.items():
            yield share(f"{part}, {kind}", (said.get(part, 0), size), goal)
    rehearsed = [each["metrics"]["allocate_kv"].get("rehearsed_allocated_bytes") for each in (predicted, measured)]
    if None not in rehearsed:
        yield share("activation peak, allocated", (rehearsed[0], rehearsed[1]), ALLOCATED)
    yield share("activation peak, reserved", account("peak_activation"), RESERVED)
    yield one("encoder cache", account("encoder_cache"), 2 * MiB)
    yield one("context", account("context"), OUTSIDE)
    yield one("libraries", account("non_torch"), OUTSIDE)
    yield one("graphs", account("cudagraph"), OUTSIDE)
    yield one("KV blocks", (predicted["kv_cache"]["num_gpu_blocks"], measured["kv_cache"]["num_gpu_blocks"]), BLOCKS)


def all_compared(predictions: Path = PREDICTIONS, measured: Path = MEASURED) -> list[Compared]:
    """Of every point that was predicted and measured and succeeded in both."""
    rows: list[Compared] = []
    for model in (*MODELS, *TEXT_MODELS):
        said, found = read(predictions, model), read(measured, model)
        for name, point in (found["points"] if said and found else {}).items():
            if said and point["status"] == "ok" and said["points"].get(name, {}).get("status") == "ok":
                rows += compared(model, name, said["points"][name], point)
    return rows


def table(rows: list[Compared]) -> str:
    header = ("point", "predicted", "measured", "difference", "", "allowed")
    lines = []
    for row in rows:
        percent = f"{100 * row.difference / row.measured:+.2f} %" if row.measured else "-"
        values = (row.predicted, row.measured, row.difference)
        cells = (*(row.shown(value) for value in values), percent, row.shown(row.allowed))
        lines.append(Row(f"{row.model} {row.point} {row.quantity}", cells, "" if row.ok else "MISSED"))
    return render(Table(header, tuple(lines)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.compare", description=__doc__)
    parser.add_argument("--predictions", type=Path, default=PREDICTIONS)
    parser.add_argument("--measured", type=Path, default=MEASURED)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = all_compared(arguments.predictions, arguments.measured)
    if arguments.json:
        print(json.dumps([{**vars(row), "ok": row.ok} for row in rows], indent=1))
    elif rows:
        missed = sum(not row.ok for row in rows)
        print(f"{table(rows)}\n{len(rows) - missed} of {len(rows)} within the goals")
    else:
        print("no point has been predicted and measured")
    return int(any(not row.ok for row in rows))


if __name__ == "__main__":
    sys.exit(main())
