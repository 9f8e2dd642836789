"""The Triton kernels against the reference backend, run by Triton's interpreter on the CPU, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    ([(4, 5), (3, 40), (0, 2060), (0, 6), (1, 30)], 2, 1, 32, 16, None),
    ([(260, 261), (30, 75)], 6, 2, 96, 256, None),
    ([(80, 81), (0, 33)], 5, 1, 192, 16, None),
    ([(150, 151), (100, 140)], 8, 1, 64, 128, 48),
    ([(70, 71), (64, 80)], 7, 1, 256, 32, 33),
    ([(31, 64), (0, 31), (64, 90)], 3, 1, 64, 32, None),
    ([(0, 2050)], 2, 1, 16, 16, None),
    ([(0, 2048)], 1, 1, 16, 16, None),
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


def padded() -> list[float]:
    """A decode whose last rows only pad: the others' differences, and how many of the padding's are not finite."""
    import torch

    from orchestrator.engine.attention.base import AttentionMetadata
    from orchestrator.engine.attention.reference import ReferenceAttention
    from orchestrator.engine.attention.triton import TritonAttention

    torch.manual_seed(0)
    meta = AttentionMetadata.build([(40, 41), (7, 8), (0, 1), (0, 1)], [[3, 1, 2], [4], [0], [0]], 16, "cpu")
    k_cache, v_cache = torch.randn(5, 16, 2, 64), torch.randn(5, 16, 2, 64)
    query, new = torch.randn(4, 4, 64), torch.randn(4, 2, 64)
    arguments = (query, new, new, k_cache, v_cache, meta, 0.125)
    ours, theirs = TritonAttention().attend(*arguments), ReferenceAttention().attend(*arguments)
    return [float((ours - theirs)[:2].abs().max()), float((~ours.isfinite()).sum())]


def test_padding_is_harmless(small: dict[str, list[float]]) -> None:
    assert small["padded"] == pytest.approx([0.0, 0.0], abs=1e-5)


def captured() -> list[float]:
    """Decodes of 1, 2 and 5 rows whose lengths only the device knows, as when a graph is captured: the differences."""
    import torch

    from orchestrator.engine.attention.base import AttentionMetadata
    from orchestrator.engine.attention.reference import ReferenceAttention
    from orchestrator.engine.attention.triton import TritonAttention

    differences = []
    for rows in (1, 2, 5):
        torch.manual_seed(rows)
        spans, tables = [(30 + row, 31 + row) for row in range(rows)], [[1, 2, 3]] * rows
        meta = AttentionMetadata.build(spans, tables, 16, "cpu")
        blind = replace(meta, lengths=(), max_seq_len=2048)
        k_cache, v_cache = torch.randn(4, 16, 2, 64), torch.randn(4, 16, 2, 64)
        query, new = torch.randn(rows, 4, 64), torch.randn(rows, 2, 64)
        ours = TritonAttention().attend(query, new, new, k_cache, v_cache, blind, 0.125)
        theirs = ReferenceAttention().attend(query, new, new, k_cache, v_cache, meta, 0.125)
        differences.append(float((ours - theirs).abs().max()))
    return differences


def test_a_captured_step_needs_no_lengths_on_the_host(small: dict[str, list[float]]) -> None:
    assert small["captured"] == pytest.approx([0.0] * 3, abs=1e-5)


def other_types() -> list[float]:
    """A decode, split and whole, and a prefill over caches of another element type than the model's: the differences.
    Numbers are whole and few, so that no type rounds them."""
    import torch

    from orchestrator.engine.attention.base import AttentionMetadata
    from orchestrator.engine.attention.reference import ReferenceAttention
    from orchestrator.engine.attention.triton import TritonAttention

    differences = []
    meta = AttentionMetadata.build([(40, 41), (3, 20)], [[1, 2, 3], [4, 5]], 16, "cpu")
    torch.manual_seed(0)
    for model, cache in ((torch.float32, torch.float16), (torch.float16, torch.float32)):
        k_cache, v_cache = (torch.randint(-2, 3, (6, 16, 2, 32)).to(cache) for _ in range(2))
        query = torch.randint(-2, 3, (18, 4, 32)).to(model)
        new = torch.zeros(18, 2, 32, dtype=model)
        arguments = (query, new, new, k_cache, v_cache, meta, 0.125)
        ours, theirs = TritonAttention().attend(*arguments), ReferenceAttention().attend(*arguments)
        differences.append(float((ours - theirs).abs().max()))
    return differences


def test_a_cache_of_another_type_than_the_models(small: dict[str, list[float]]) -> None:
    assert small["other_types"] == pytest.approx([0.0] * 2, abs=0.02)


def small_ones() -> dict[str, list[float]]:
    return {each.__name__: each() for each in (padded, captured, other_types)}


@pytest.fixture(scope="module")
def small() -> dict[str, list[float]]:
    """Of one process, because that takes longest to begin."""
    found: dict[str, list[float]] = interpreted("small_ones")
    return found


@pytest.mark.parametrize("kv_heads", [1, 2, 8, 32, 300])
def test_warming_up_launches_each_kernel(kv_heads: int) -> None:
    from orchestrator.engine.attention.base import AttentionShape
    from orchestrator.engine.attention.parts import num_splits
    from orchestrator.engine.attention.triton import TritonAttention

    class Noting(TritonAttention):
        def attend(self, query: Any, key: Any, value: Any, k_cache: Any, v_cache: Any, meta: Any, scale: float) -> Any:
            splits.add(num_splits(meta.num_seqs, k_cache.shape[2]) if meta.max_query_len == 1 else 0)
            return query

    splits: set[int] = set()
    Noting().warm_up(AttentionShape(kv_heads, kv_heads, 16, 16, "float32", "float32"), "cpu")
    # 0 is a prefill.
    assert splits == {0} | {num_splits(count, kv_heads) for count in range(1, 600)}


def interpreted(function: str) -> Any:
    """What a function of this file returns in a process whose Triton interprets."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    root = Path(__file__).resolve().parent.parent
    code = f"import json; from tests.test_triton_attention import {function} as f; print(json.dumps(f()))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_kernels_equal_the_reference() -> None:
    assert interpreted("compare") == pytest.approx([0.0] * len(CASES), abs=1e-5)


def test_what_changes_from_step_to_step_compiles_no_kernel_of_its_own() -> None:
    from orchestrator.engine.attention import triton_kernels as kernels

    for kernel, names in (
        (kernels.decode_kernel, {"block_tables", "seq_lens"}),
        (kernels.prefill_kernel, {"block_tables", "seq_lens", "query_start_loc"}),
    ):
        parameters = {parameter.name: parameter for parameter in kernel.params}
        assert all(parameters[name].do_not_specialize for name in ("window", "stride_table"))
        assert all(parameters[name].do_not_specialize_on_alignment for name in names)


@pytest.mark.parametrize("capability", [0, 75, 80, 89, 90, 120])
def test_tiles_are_of_sizes_that_triton_takes(capability: int) -> None:
    from orchestrator.engine.attention.tiles import decode_tiles, prefill_tiles

    for width in (16, 64, 128, 256):
        for itemsize in (2, 4):
            tiles = prefill_tiles(width, itemsize, capability)
            assert all(size >= 16 and size & (size - 1) == 0 for size in (tiles.rows, tiles.keys))
        for heads in (1, 4, 7, 71):
            assert decode_tiles(heads, width).rows >= max(16, heads)
