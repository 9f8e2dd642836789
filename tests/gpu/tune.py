"""Which tiles, which output layer and which of torch's kernels are fastest on this device; prints one JSON line.

What it finds is written by hand into `engine/attention/tiles.py` and `engine/head.py`. Each configuration is compared
with the reference first; one that does not compile or fit says so in its place.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from orchestrator.engine.attention.reference import ReferenceAttention
from orchestrator.engine.attention.tiles import Tiles
from orchestrator.engine.attention.triton import TritonAttention
from orchestrator.engine.likeliest import likeliest
from tests.gpu.attention import DEVICE, Spans, arguments, milliseconds

PREFILL = (
    *(Tiles(128, 64, warps, stages) for warps, stages in ((8, 3), (8, 2), (8, 4), (4, 3))),
    *(Tiles(128, 128, warps, stages) for warps, stages in ((8, 2), (8, 3), (4, 2))),
    *(Tiles(64, keys, 4, stages) for keys, stages in ((64, 3), (64, 2), (128, 2))),
    Tiles(128, 32, 8, 4),
)
DECODE = (
    *(Tiles(16, keys, 4, stages) for keys, stages in product((32, 64, 128), (2, 3, 4))),
    *(Tiles(16, keys, 2, stages) for keys, stages in ((32, 4), (64, 3))),
    Tiles(16, 128, 8, 3),
)
CHUNK: Spans = [(24576, 32768)]
SHORT: Spans = [(1024, 1536)] * 16
DECODES: dict[str, Spans] = {
    "256 of 256": [(255, 256)] * 256,
    "256 of 2048": [(2047, 2048)] * 256,
    "64 of 2048": [(2047, 2048)] * 64,
    "8 of 16384": [(16383, 16384)] * 8,
    "1 of 2048": [(2047, 2048)],
}


def tried(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:
        torch.cuda.synchronize()
        return f"{type(error).__name__}: {str(error)[:160]}"


def on_device_ms(work: Callable[[], Any], times: int = 20) -> float:
    """Milliseconds a call where the host is no part of it: several calls as one graph."""
    work()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(times):
            work()
    return milliseconds(graph.replay, 5) / times


def error_of(backend: TritonAttention, spans: Spans) -> float:
    step = arguments(spans, 32, 8, 128, 16, torch.bfloat16)
    exact = ReferenceAttention().attend(*step).float()
    return float((backend.attend(*step).float() - exact).norm() / exact.norm())


def prefill() -> dict[str, Any]:
    """TFLOP/s, and the error."""
    found: dict[str, Any] = {}
    chunk = arguments(CHUNK, 32, 8, 128, 16, torch.bfloat16)
    short = arguments(SHORT, 32, 8, 128, 16, torch.bfloat16)
    for tiles in PREFILL:
        backend = TritonAttention(prefill=tiles)

        def row(backend: TritonAttention = backend) -> list[float]:
            long_ms = milliseconds(lambda: backend.attend(*chunk), 3)
            short_ms = milliseconds(lambda: backend.attend(*short), 5)
            error = error_of(backend, [(100, 700), (0, 130), (300, 333)])
            return [round(flops(CHUNK) / long_ms / 1e9, 1), round(flops(SHORT) / short_ms / 1e9, 1), round(error, 5)]

        found[str(tiles)] = tried(row)
    return found


def flops(spans: Spans, heads: int = 32, width: int = 128) -> float:
    pairs = sum((stop - start) * (start + stop + 1) / 2 for start, stop in spans)
    return 4.0 * pairs * heads * width


def decode() -> dict[str, Any]:
    """Microseconds, by case in the order of `DECODES`."""
    steps = [arguments(spans, 32, 8, 128, 16, torch.bfloat16) for spans in DECODES.values()]
    found: dict[str, Any] = {"cases": list(DECODES)}
    for tiles in DECODE:
        backend = TritonAttention(decode=tiles)

        def row(backend: TritonAttention = backend) -> list[float]:
            times = [round(1000 * on_device_ms(lambda: backend.attend(*step), 5), 1) for step in steps]  # noqa: B023
            return [*times, round(error_of(backend, [(299, 300), (41, 42)]), 5)]

        found[str(tiles)] = tried(row)
    return found


def heads() -> dict[str, Any]:
    """Milliseconds of the output layer of 92,553 tokens, by how its result lies, and of what comes after it."""
    vocabulary, width = 92553, 4096
    weight = torch.randn(vocabulary, width, device=DEVICE).mul_(0.02).bfloat16()
    longer = torch.cat([weight, weight[:7]])
    found: dict[str, Any] = {}
    for rows in (256, 200, 64, 8, 2, 1):
        hidden = torch.randn(rows, width, device=DEVICE).bfloat16()
        room = torch.empty(rows, 92560, device=DEVICE, dtype=torch.bfloat16)
        wide = torch.empty(rows, 92672, device=DEVICE, dtype=torch.bfloat16)
        logits = hidden @ weight.t()

        def before(logits: torch.Tensor = logits) -> Any:
            full = logits.float()
            tokens = full.argmax(-1)
            return tokens, full.log_softmax(-1).gather(-1, tokens.unsqueeze(-1))

        ways: dict[str, Callable[[], Any]] = {
            "plain": lambda h=hidden: h @ weight.t(),  # type: ignore[misc]
            "result in rows of 92560": lambda h=hidden, r=room: torch.mm(h, weight.t(), out=r[:, :vocabulary]),  # type: ignore[misc]
            "result in rows of 92672": lambda h=hidden, r=wide: torch.mm(h, weight.t(), out=r[:, :vocabulary]),  # type: ignore[misc]
            "result transposed": lambda h=hidden: weight @ h.t(),  # type: ignore[misc]
            "weights of 92560 rows": lambda h=hidden: h @ longer.t(),  # type: ignore[misc]
            "likeliest before": before,
            "likeliest": lambda each=logits: likeliest(each),  # type: ignore[misc]
        }
        found[str(rows)] = {name: tried(lambda way=way: round(on_device_ms(way, 5), 4)) for name, way in ways.items()}  # type: ignore[misc]
        found[str(rows)]["tokens_equal"] = bool((likeliest(logits)[0] == logits.argmax(-1)).all())
    return found


def first_calls() -> dict[str, Any]:
    """Milliseconds on the host and in all of a call with a length that was never seen, and of the second."""
    kinds = {
        "as torch chooses": None,
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
    }
    return {name: tried(lambda kind=kind: _first_calls(kind)) for name, kind in kinds.items()}  # type: ignore[misc]


def _first_calls(kind: SDPBackend | None) -> dict[str, Any]:
    rows = []
    for length in (3000, 3001, 3016, 3333):
        key = torch.randn(1, 8, length, 128, device=DEVICE, dtype=torch.bfloat16)
        query = torch.randn(1, 32, length, 128, device=DEVICE, dtype=torch.bfloat16)

        def work(query: torch.Tensor = query, key: torch.Tensor = key) -> None:
            if kind is None:
                scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
                return
            with sdpa_kernel(kind):
                scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)

        row: list[float] = [length]
        for _ in range(2):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            work()
            row.append(round(1000 * (time.perf_counter() - begin), 3))
            torch.cuda.synchronize()
            row.append(round(1000 * (time.perf_counter() - begin), 3))
        rows.append(row)
    return {"length, host 1st, whole 1st, host 2nd, whole 2nd": rows, "8192_ms": round(_long(kind), 4)}


def _long(kind: SDPBackend | None) -> float:
    query = torch.randn(1, 32, 8192, 128, device=DEVICE, dtype=torch.bfloat16)
    key = torch.randn(1, 8, 8192, 128, device=DEVICE, dtype=torch.bfloat16)

    def work() -> None:
        scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)

    if kind is None:
        return milliseconds(work, 5)
    with sdpa_kernel(kind):
        return milliseconds(work, 5)


def main() -> None:
    begin = time.perf_counter()
    result: dict[str, Any] = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    parts: Sequence[Callable[[], Any]] = (first_calls, heads, decode, prefill)
    for part in parts:
        result[part.__name__] = tried(part)
        result[f"{part.__name__}_s"] = round(time.perf_counter() - begin, 1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
