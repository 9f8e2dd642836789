"""The paged backends' speed beside torch's own kernels on contiguous tensors of the same shapes; prints one JSON line.

Decodes in TB/s of keys and values, prefills in TFLOP/s, bfloat16, blocks of 16 tokens, 32 query heads. Torch's kernel
has no block table to look into, so what it reaches is the goal. Decodes are timed as graphs, as they are served. A long
prefill without context is torch's kernel in both columns: the backend calls it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from orchestrator.engine.attention.triton import TritonAttention
from tests.gpu.attention import Spans, arguments, milliseconds
from tests.gpu.tune import flops, on_device_ms, tried

HEADS, BLOCK = 32, 16
MAIN = (128, 8)
"""Head size and kv heads that have every shape; the others have one of each kind."""
OTHERS = ((128, 32), (128, 4), (64, 32), (64, 8), (64, 4))
DECODES = [(batch, context) for context in (256, 2048, 16384) for batch in (1, 8, 64, 256)]
PREFILLS = [(512, 0), (2048, 0), (8192, 0), (8192, 8192)]


def decode(batch: int, context: int, width: int, kv_heads: int) -> dict[str, Any]:
    spans: Spans = [(context - 1, context)] * batch
    step = arguments(spans, HEADS, kv_heads, width, BLOCK, torch.bfloat16)
    size = 2 * batch * context * kv_heads * width * 2
    # The same memory read in its order: as if no block were out of place.
    keys, values = (cache[1:].view(batch, context, kv_heads, width).transpose(1, 2) for cache in step[3:5])
    query = step[0].view(batch, HEADS, 1, width)

    def torchs() -> torch.Tensor:
        return scaled_dot_product_attention(query, keys, values, enable_gqa=kv_heads != HEADS)

    ours = on_device_ms(lambda: TritonAttention().attend(*step), 5)
    theirs = tried(lambda: on_device_ms(torchs, 5))
    return _row({"decode": batch, "context": context}, width, kv_heads, ours, theirs, size / 1e9, "TB/s")


def prefill(fresh: int, context: int, width: int, kv_heads: int) -> dict[str, Any]:
    spans: Spans = [(context, context + fresh)]
    step = arguments(spans, HEADS, kv_heads, width, BLOCK, torch.bfloat16)
    keys, values = (cache[1:].view(1, -1, kv_heads, width).transpose(1, 2) for cache in step[3:5])
    query = step[0].transpose(0, 1).unsqueeze(0)

    def torchs() -> torch.Tensor:
        grouped = kv_heads != HEADS
        if not context:
            return scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=grouped)
        mask = causal_lower_right(fresh, context + fresh)
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=grouped)

    ours = milliseconds(lambda: TritonAttention().attend(*step), 5)
    theirs = tried(lambda: milliseconds(torchs, 5))
    work = flops(spans, HEADS, width) / 1e9
    return _row({"prefill": fresh, "context": context}, width, kv_heads, ours, theirs, work, "TFLOP/s")


def _row(
    what: dict[str, int], width: int, kv_heads: int, ours: float, theirs: Any, work: float, unit: str
) -> dict[str, Any]:
    row: dict[str, Any] = what | {"head_size": width, "group": HEADS // kv_heads, "triton_ms": round(ours, 4)}
    row |= {"unit": unit, "triton": round(work / ours, 2)}
    if isinstance(theirs, str):
        return row | {"torch": theirs}
    return row | {"torch_ms": round(theirs, 4), "torch": round(work / theirs, 2), "ratio": round(theirs / ours, 2)}


def main() -> None:
    shapes: list[tuple[Callable[..., dict[str, Any]], tuple[int, ...]]] = []
    shapes += [(decode, (*shape, *MAIN)) for shape in DECODES]
    shapes += [(prefill, (*shape, *MAIN)) for shape in PREFILLS]
    for other in OTHERS:
        shapes += [(decode, (64, 2048, *other)), (prefill, (2048, 0, *other)), (prefill, (8192, 8192, *other))]
    rows = []
    for measure, shape in shapes:
        rows.append(tried(lambda: measure(*shape)))  # noqa: B023
        torch.cuda.empty_cache()
    print(json.dumps({"torch": torch.__version__, "device": torch.cuda.get_device_name(), "rows": rows}))


if __name__ == "__main__":
    main()
