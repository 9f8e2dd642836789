"""The Triton kernels against the reference backend, run by Triton's interpreter on the CPU, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

CASES = [
    # spans of new positions (start, stop), query heads, kv heads, head size, block size, window
    ([(0, 1)], 1, 1, 16, 16, None),
    ([(4, 5), (99, 100), (63, 64)], 4, 2, 64, 16, None),
    ([(300, 301)], 8, 1, 64, 256, None),
    ([(0, 37), (0, 5)], 4, 4, 64, 16, None),
    ([(20, 57), (16, 32)], 4, 2, 32, 16, None),
    ([(7, 8), (150, 151), (40, 90), (0, 3)], 6, 2, 80, 32, None),
    ([(0, 130), (131, 132)], 2, 1, 128, 64, None),
    ([(10, 40), (5, 6)], 2, 2, 256, 16, None),
    ([(200, 201), (3, 4), (0, 150)], 2, 1, 32, 16, 20),
    ([(90, 190), (0, 70)], 2, 1, 32, 16, 64),
    ([(4, 5), (3, 40), (0, 520), (0, 6), (1, 30)], 2, 1, 32, 16, None),
]


def compare() -> list[float]:
    """The largest differences, one a case; rows in any order of sequences, blocks in a random order of the pool."""
    import torch

    from orchestrator.engine.attention.base import AttentionMetadata
    from orchestrator.engine.attention.reference import ReferenceAttention
    from orchestrator.engine.attention.triton import TritonAttention

    differences: list[float] = []
    for spans, heads, kv_heads, width, block_size, window in CASES:
        torch.manual_seed(len(differences))
        counts = [-(-stop // block_size) for _, stop in spans]
        order = (torch.randperm(sum(counts)) + 1).tolist()
        tables = [[order.pop() for _ in range(count)] for count in counts]
        meta = replace(AttentionMetadata.build(spans, tables, block_size, "cpu"), window=window)
        tokens = int(meta.query_start_loc[-1])
        k_cache = torch.randn(sum(counts) + 1, block_size, kv_heads, width)
        v_cache = torch.randn_like(k_cache)
        k_cache[0] = v_cache[0] = float("nan")
        query = torch.randn(tokens, heads, width)
        # The new tokens' keys and values are in the cache when a backend is called.
        key = k_cache.flatten(0, 1)[meta.slot_mapping]
        value = v_cache.flatten(0, 1)[meta.slot_mapping]
        arguments = (query, key, value, k_cache, v_cache, meta, width**-0.5)
        ours, theirs = TritonAttention().attend(*arguments), ReferenceAttention().attend(*arguments)
        differences.append(float((ours - theirs).abs().max()))
    return differences


def test_the_kernels_equal_the_reference() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    root = Path(__file__).resolve().parent.parent
    code = "import json; from tests.test_triton_attention import compare; print(json.dumps(compare()))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == pytest.approx([0.0] * len(CASES), abs=1e-5)
