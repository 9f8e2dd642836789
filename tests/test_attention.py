from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from orchestrator.engine.attention.base import BOTH_WAYS, WINDOW, AttentionBackend, AttentionMetadata
from orchestrator.engine.attention.reference import ReferenceAttention
from orchestrator.engine.kv_cache import blocks_for


class Sequences:
    """Random sequences whose first `contexts` tokens are in a cache of shuffled blocks, the rest a step's new ones."""

    def __init__(
        self,
        contexts: list[int],
        fresh: list[int],
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        window: int | None = None,
        both_ways: list[list[tuple[int, int]]] | None = None,
    ) -> None:
        torch.manual_seed(0)
        lengths = [context + new for context, new in zip(contexts, fresh, strict=True)]
        self.keys = [torch.randn(length, kv_heads, head_dim) for length in lengths]
        self.values = [torch.randn(length, kv_heads, head_dim) for length in lengths]
        self.spans = list(zip(contexts, lengths, strict=True))
        needed = [blocks_for(length, block_size) for length in lengths]
        order = (torch.randperm(sum(needed)) + 1).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in needed]
        # What lies beyond a sequence's own tokens must not matter, however large it is.
        self.k_cache = torch.full((sum(needed) + 1, block_size, kv_heads, head_dim), 1e4)
        self.v_cache = self.k_cache.clone()
        for table, keys, values in zip(self.tables, self.keys, self.values, strict=True):
            for position in range(keys.shape[0]):
                block, offset = table[position // block_size], position % block_size
                self.k_cache[block, offset], self.v_cache[block, offset] = keys[position], values[position]
        self.query = torch.randn(sum(fresh), heads, head_dim)
        self.window, self.runs = window, both_ways or [[] for _ in lengths]
        meta = AttentionMetadata.build(self.spans, self.tables, block_size, "cpu", self.runs)
        self.meta = replace(meta, window=window)
        self.scale = head_dim**-0.5

    def attend(self, backend: AttentionBackend) -> torch.Tensor:
        new = [slice(start, stop) for start, stop in self.spans]
        key = torch.cat([keys[rows] for keys, rows in zip(self.keys, new, strict=True)])
        value = torch.cat([values[rows] for values, rows in zip(self.values, new, strict=True)])
        return backend.attend(self.query, key, value, self.k_cache, self.v_cache, self.meta, self.scale)

    def naive(self) -> torch.Tensor:
        """Token by token, head by head: a softmax over what comes before."""
        output = torch.empty_like(self.query)
        row = 0
        for index, ((start, stop), keys, values) in enumerate(zip(self.spans, self.keys, self.values, strict=True)):
            group = self.query.shape[1] // keys.shape[1]
            for position in range(start, stop):
                seen = [at for at in range(stop) if self.looks(index, position, at)]
                for head in range(self.query.shape[1]):
                    scores = keys[seen, head // group] @ self.query[row, head] * self.scale
                    output[row, head] = scores.softmax(0) @ values[seen, head // group]
                row += 1
        return output

    def looks(self, index: int, position: int, at: int) -> bool:
        """Whether the token of a sequence at `position` looks at the one at `at`."""
        together = any(start <= min(position, at) and max(position, at) < stop for start, stop in self.runs[index])
        return (at <= position or together) and (self.window is None or at > position - self.window)


@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_reference_equals_a_softmax(head_dim: int, heads: int, kv_heads: int) -> None:
    case = Sequences(
        [0, 0, 17, 31, 5], [1, 13, 1, 9, 20], heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=16
    )
    torch.testing.assert_close(case.attend(ReferenceAttention()), case.naive())


@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 64])
def test_reference_reads_blocks_of_any_size(block_size: int) -> None:
    case = Sequences([0, 33, 64], [7, 6, 1], heads=4, kv_heads=2, head_dim=16, block_size=block_size)
    torch.testing.assert_close(case.attend(ReferenceAttention()), case.naive())


def test_a_long_chunk_on_a_context_is_cut_without_a_seam() -> None:
    case = Sequences([10], [23], heads=2, kv_heads=1, head_dim=16, block_size=16)
    torch.testing.assert_close(case.attend(ReferenceAttention(scores_at_once=4 * 2 * 33)), case.naive())


@pytest.mark.parametrize("scores_at_once", [1 << 26, 4 * 3 * 40])
@pytest.mark.parametrize("window", [None, 1, 7, 16, 17, 64])
@pytest.mark.parametrize("runs", [False, True])
def test_windows_and_tokens_that_look_both_ways(window: int | None, runs: bool, scores_at_once: int) -> None:
    both_ways = [[(2, 9)], [(1, 5), (18, 26), (28, 30)], [], [(0, 16)]]
    case = Sequences(
        [0, 17, 39, 20], [13, 13, 1, 4], heads=4, kv_heads=2, head_dim=16, block_size=8, window=window,
        both_ways=both_ways if runs else None,
    )  # fmt: skip
    torch.testing.assert_close(case.attend(ReferenceAttention(scores_at_once)), case.naive())


def test_spans_of_the_past_need_no_second_look() -> None:
    meta = AttentionMetadata.build([(4, 6), (3, 9)], [[1, 2], [3, 4, 5]], 4, "cpu", [[(0, 4)], [(1, 3), (4, 8)]])
    assert meta.both_ways == ((), ((4, 8),))
    assert AttentionMetadata.build([(4, 6)], [[1, 2]], 4, "cpu", [[(0, 4)]]).both_ways == ()


def test_a_backend_says_which_abilities_it_lacks() -> None:
    class Plain(ReferenceAttention):
        abilities: ClassVar[frozenset[str]] = frozenset()

    assert ReferenceAttention.lacks(frozenset({WINDOW, BOTH_WAYS})) is None
    assert Plain.lacks(frozenset()) is None
    assert Plain.lacks(frozenset({WINDOW})) == f"the model needs {WINDOW}, which it does not have"


def test_the_scale_is_the_callers() -> None:
    case = Sequences([4], [3], heads=2, kv_heads=2, head_dim=16, block_size=16)
    case.scale = 1 / math.sqrt(3)
    torch.testing.assert_close(case.attend(ReferenceAttention()), case.naive())


def test_metadata_of_a_mixed_step() -> None:
    meta = AttentionMetadata.build([(0, 3), (6, 7)], [[4], [2, 9]], 4, "cpu")
    assert meta.query_start_loc.tolist() == [0, 3, 4]
    assert meta.seq_lens.tolist() == [3, 7]
    assert meta.block_tables.tolist() == [[4, 0], [2, 9]]
    assert meta.slot_mapping.tolist() == [16, 17, 18, 38]
    assert (meta.max_query_len, meta.max_seq_len) == (3, 7)


def test_a_backend_says_what_it_cannot_take() -> None:
    class Picky(ReferenceAttention):
        devices: ClassVar[frozenset[str]] = frozenset({"cuda"})
        head_sizes: ClassVar[frozenset[int]] = frozenset({64, 128})

    assert ReferenceAttention.refusal("cpu", "float32", 16) is None
    assert Picky.refusal("cuda", "bfloat16", 64) is None
    assert Picky.refusal("cpu", "float32", 64) == "it does not take devices of kind cpu, only cuda"
    assert Picky.refusal("cuda", "float32", 16) == "it does not take heads of size 16, only 64, 128"
