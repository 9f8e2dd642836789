"""What this planner and `ridgepoint` say of text models, beside what was measured.

    pip install ridgepoint
    python -m tests.benchmarks.planners

Each plans for its own engine: this one for this project's, ridgepoint for vLLM at the share of 0.90 that it knows. So
each is judged by a measurement of that engine, where there is one, and the two are not expected to be equal.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import UserError
from orchestrator.plan.planner import Planner
from orchestrator.planning import plan
from orchestrator.registry import Registry
from orchestrator.report.layout import Row, Table, render
from orchestrator.units import GiB
from tests.gpu.points import MEASURED, points_of, read

_UTIL = 0.9


@dataclass(frozen=True)
class Text:
    """A text model, as each planner takes it.

    Attributes:
        model: of the points.
        layers, width, heads, kv_heads, parameters: what ridgepoint is told.
        card, other_card: this planner's and ridgepoint's name of the card.
        more: overrides.
        peer_gib: GiB of KV cache that vLLM reported, if it is known.
    """

    model: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    parameters: int
    longest: int
    card: str = "h200"
    other_card: str = "h200-141gb"
    more: tuple[str, ...] = ()
    peer_gib: float | None = None


_LLAMA = ("llama_3_8b", 32, 4096, 32, 8, 8_030_261_248, 8192)
MODELS = (
    Text("opt_125m", 12, 768, 12, 12, 125_239_296, 2048),
    Text("smollm2_135m", 30, 576, 9, 3, 134_515_008, 8192),
    Text(*_LLAMA),
    Text(*_LLAMA, "h100_80g", "h100-80gb", ("gpu.total_bytes=79.22GiB",), 54.90),
)


def theirs(text: Text) -> dict[str, Any]:
    """What ridgepoint says."""
    core = importlib.import_module("ridgepoint._core")
    kind = "mha" if text.heads == text.kv_heads else "gqa"
    shape = (text.model, text.layers, text.layers, text.width, text.parameters, text.parameters, kind)
    heads = (text.width // text.heads, text.heads, text.kv_heads, 0, 0)
    settings = (text.other_card, 1, "vllm", "fp16", "fp16", text.longest, text.longest, True)
    said: dict[str, Any] = json.loads(core.fit_shape(*shape, *heads, *settings))
    return said


def row(text: Text, registry: Registry) -> Row:
    point = points_of(text.model)[0]
    start = time.perf_counter()
    planned = Planner([*point.overrides, *text.more], registry, plan).planned(text.card)
    fit, seconds = planned.footprint.at(_UTIL), time.perf_counter() - start
    pool = theirs(text)["memory"]["kv_pool_bytes"]
    measured = (read(MEASURED, text.model) or {"points": {}})["points"].get(point.name) if not text.more else None
    ours = measured["ledger"]["accounts"]["kv_cache"] / GiB if measured else None
    between = f"{pool['low'] / GiB:.2f} to {pool['high'] / GiB:.2f}"
    cells = (
        *(text.card, f"{fit.bytes / GiB:.2f}", _error(fit.bytes, ours)),
        *(f"{pool['best'] / GiB:.2f}", between, _error(pool["best"], text.peer_gib), f"{seconds:.1f}"),
    )
    return Row(text.model, cells)


def _error(predicted: float, measured_gib: float | None) -> str:
    return "-" if measured_gib is None else f"{100 * (predicted / GiB / measured_gib - 1):+.2f} %"


def main() -> int:
    try:
        importlib.import_module("ridgepoint")
    except ImportError:
        sys.stderr.write("error: the package ridgepoint is not installed; pip install ridgepoint\n")
        return 2
    registry = Registry.discover()
    header = ("KV cache, GiB", "card", "ours", "off by", "ridgepoint", "its band", "off by", "s")
    try:
        print(render(Table(header, tuple(row(text, registry) for text in MODELS))))
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
