"""The Triton backend against the reference in higher precision, and the time both take; prints one JSON line."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from orchestrator.engine.attention.base import AttentionBackend, AttentionMetadata
from orchestrator.engine.attention.reference import ReferenceAttention
from orchestrator.engine.attention.triton import TritonAttention

DEVICE = "cuda:0"
Spans = Sequence[tuple[int, int]]

SHAPES: tuple[tuple[Spans, int, int, int, int], ...] = (
    # spans of new positions, query heads, kv heads, head size, block size
    ([(4, 5), (99, 100), (63, 64)], 4, 2, 64, 16),
    ([(300, 301)], 8, 1, 64, 256),
    ([(20, 57), (16, 32)], 4, 2, 32, 16),
    ([(7, 8), (150, 151), (40, 90), (0, 3)], 6, 2, 80, 32),
    ([(10, 40)], 2, 2, 256, 16),
    ([(1999, 2000)] * 64, 32, 8, 128, 16),
    ([(4999, 5000), (100, 1300), (0, 900)], 32, 8, 128, 16),
)
TIMED: dict[str, Spans] = {
    "decode 256 sequences of 256": [(255, 256)] * 256,
    "decode 256 sequences of 2048": [(2047, 2048)] * 256,
    "decode 1 sequence of 32768": [(32767, 32768)],
    "prefill 8192": [(0, 8192)],
    "prefill 4 x 4096": [(0, 4096)] * 4,
    "chunk of 8192 after 24576": [(24576, 32768)],
}


def arguments(
    spans: Spans, heads: int, kv_heads: int, width: int, block_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata, float]:
    """A step on random keys and values, each sequence's blocks in a random order."""
    torch.manual_seed(0)
    counts = [-(-stop // block_size) for _, stop in spans]
    order = (torch.randperm(sum(counts)) + 1).tolist()
    tables = [[order.pop() for _ in range(count)] for count in counts]
    meta = AttentionMetadata.build(spans, tables, block_size, DEVICE)
    k_cache = torch.randn(sum(counts) + 1, block_size, kv_heads, width, device=DEVICE).to(dtype)
    v_cache = torch.randn_like(k_cache)
    query = torch.randn(int(meta.query_start_loc[-1]), heads, width, device=DEVICE).to(dtype)
    key, value = (cache.flatten(0, 1)[meta.slot_mapping] for cache in (k_cache, v_cache))
    return query, key, value, k_cache, v_cache, meta, width**-0.5


def relative_error(spans: Spans, heads: int, kv_heads: int, width: int, block_size: int, dtype: torch.dtype) -> float:
    """|ours - exact| / |exact|, the exact one in float64."""
    step = arguments(spans, heads, kv_heads, width, block_size, dtype)
    query, key, value, k_cache, v_cache = (tensor.double() for tensor in step[:5])
    exact = ReferenceAttention().attend(query, key, value, k_cache, v_cache, *step[5:])
    ours = TritonAttention().attend(*step).double()
    return float((ours - exact).norm() / exact.norm())


def milliseconds(work: Callable[[], Any], times: int) -> float:
    """The median on the device, after three warm-ups."""
    for _ in range(3):
        work()
    readings = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        readings.append(begin.elapsed_time(end))
    return float(median(readings))


def timed(backend: AttentionBackend, spans: Spans, times: int) -> float:
    step = arguments(spans, 32, 8, 128, 16, torch.bfloat16)
    return milliseconds(lambda: backend.attend(*step), times)


def main() -> None:
    errors = {
        str(dtype).removeprefix("torch."): max(relative_error(*shape, dtype) for shape in SHAPES)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    }
    times = {
        name: {"triton_ms": timed(TritonAttention(), spans, 20), "reference_ms": timed(ReferenceAttention(), spans, 5)}
        for name, spans in TIMED.items()
    }
    print(json.dumps({"device": torch.cuda.get_device_name(), "largest_relative_error": errors, "times": times}))


if __name__ == "__main__":
    main()
