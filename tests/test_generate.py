from __future__ import annotations

import pytest
import torch

from orchestrator.engine.encoder_cache import EncoderCache, EncoderCacheError, EncoderIndex
from orchestrator.engine.generate import Limits, Scheduler, run_all
from orchestrator.engine.kv_cache import BlockPool
from orchestrator.engine.step import Axes, OpenRequest, PlacedItem, Step
from orchestrator.modality.base import MediaInputs


def item(name: str, rows: int, at: int) -> PlacedItem:
    """An item of `rows` encoder tokens at the positions from `at` on."""
    return PlacedItem(MediaInputs("image", [0] * rows, [True] * rows, {}, name), tuple(range(at, at + rows)))


def prompt(tokens: int, max_tokens: int = 2, *items: PlacedItem) -> OpenRequest:
    return OpenRequest(list(range(tokens)), max_tokens, items)


class Bench:
    """A scheduler whose steps run at once and always draw the token 7."""

    def __init__(
        self, *, blocks: int = 16, seqs: int = 4, tokens: int = 16, rows: int = 8, compute: int = 8, length: int = 64
    ) -> None:
        self.pool, self.encoder = BlockPool(blocks), EncoderIndex(rows)
        self.scheduler = Scheduler(Limits(length, seqs, tokens, compute), 4, self.pool, self.encoder)
        self.encoded: list[str] = []

    def run(self, *requests: OpenRequest) -> list[Step]:
        for request in requests:
            self.scheduler.add(request)
        steps = []
        for step in run_all(self.scheduler):
            steps.append(step)
            self.encoded += [inputs.content_hash for inputs in step.encode]
            for chunk in step.chunks:
                for placed in chunk.sequence.items:
                    if placed.first < chunk.stop and placed.stop > chunk.start:
                        assert placed.inputs.content_hash in self.encoder
            self.scheduler.complete(step, [(7, -0.5) for chunk in step.chunks if chunk.samples])
        assert self.pool.num_free == self.pool.num_blocks
        assert self.encoder.can_add(self.encoder.capacity)
        return steps


def test_every_request_ends_with_its_tokens() -> None:
    bench = Bench()
    requests = [prompt(5, count) for count in (1, 2, 3, 4, 5, 6)]
    bench.run(*requests)
    assert [request.output for request in requests] == [[7] * count for count in (1, 2, 3, 4, 5, 6)]
    assert {request.finish_reason for request in requests} == {"length"}


def test_a_stop_token_ends_a_request() -> None:
    request = OpenRequest([1, 2], 9, stop_ids=frozenset({7}))
    Bench().run(request)
    assert (request.finish_reason, request.output, request.logprobs) == ("stop", [7], [-0.5])


def test_a_step_holds_a_decode_and_a_prefill() -> None:
    bench = Bench(tokens=8)
    bench.run(prompt(6, 4), prompt(10, 2))
    assert any(record.num_decodes and record.num_prefills for record in bench.scheduler.records)


def test_a_long_prompt_is_cut_into_chunks_and_no_step_is_too_large() -> None:
    bench = Bench(tokens=8)
    steps = bench.run(prompt(20, 2))
    spans = [(chunk.start, chunk.stop) for step in steps for chunk in step.chunks]
    assert spans == [(0, 8), (8, 16), (16, 20), (20, 21)]
    assert max(step.num_tokens for step in steps) <= 8


def test_decodes_come_first_in_a_step() -> None:
    bench = Bench(tokens=4)
    steps = bench.run(prompt(3, 4), prompt(12, 1))
    mixed = [step for step in steps if len(step.chunks) == 2 and step.chunks[0].decode]
    assert mixed
    assert all(step.num_tokens == 4 for step in mixed[:2])


def test_more_sequences_than_tokens_in_a_step() -> None:
    bench = Bench(tokens=2, seqs=4)
    requests = [prompt(2, 5) for _ in range(4)]
    bench.run(*requests)
    assert {request.finish_reason for request in requests} == {"length"}


def test_no_more_run_than_allowed() -> None:
    bench = Bench(seqs=2, blocks=64)
    steps = bench.run(*[prompt(2, 3) for _ in range(5)])
    assert max(len(step.chunks) for step in steps) == 2


def test_a_request_waits_until_its_blocks_are_free() -> None:
    bench = Bench(blocks=4)
    first, second = prompt(8, 4), prompt(8, 4)
    steps = bench.run(first, second)
    assert steps[0].chunks[0].sequence is first
    assert all(len(step.chunks) == 1 for step in steps)
    assert first.finish_reason == second.finish_reason == "length"


@pytest.mark.parametrize(
    ("request_", "numbers"),
    [
        (prompt(0), ("no tokens",)),
        (prompt(3, 0), ("max_tokens is 0", "at least 1")),
        (prompt(60, 8), ("68 in all", "max_model_len is 64")),
        (prompt(40, 2), ("42 tokens take 11 blocks", "which has 8")),
        (prompt(20, 2, item("a", 9, 2)), ("9 encoder tokens", "holds 8")),
        (prompt(20, 2, item("a", 7, 2)), ("7 encoder tokens", "encodes 6")),
    ],
)
def test_what_can_never_run_ends_alone_with_its_numbers(request_: OpenRequest, numbers: tuple[str, ...]) -> None:
    bench = Bench(blocks=8, compute=6)
    other = prompt(4)
    bench.run(request_, other)
    assert request_.finish_reason == "error"
    assert all(number in (request_.error or "") for number in numbers)
    assert other.finish_reason == "length"


def test_a_request_as_long_as_the_model_allows_runs() -> None:
    request = prompt(56, 8)
    Bench().run(request)
    assert request.finish_reason == "length"


def test_equal_items_are_encoded_once() -> None:
    bench = Bench()
    bench.run(prompt(10, 2, item("a", 4, 1)), prompt(10, 2, item("a", 4, 3)))
    bench.run(prompt(10, 2, item("a", 4, 1)))
    assert bench.encoded == ["a"]


def test_three_requests_that_need_more_items_than_are_kept_all_end() -> None:
    bench = Bench(rows=8, compute=8, tokens=32, blocks=64)
    requests = [prompt(16, 2, item(f"{n}a", 4, 1), item(f"{n}b", 4, 8)) for n in range(3)]
    steps = bench.run(*requests)
    assert sorted(bench.encoded) == ["0a", "0b", "1a", "1b", "2a", "2b"]
    assert {request.finish_reason for request in requests} == {"length"}
    assert all(step.chunks for step in steps)


def test_two_items_that_do_not_fit_together_are_served_one_after_the_other() -> None:
    bench = Bench(rows=9, compute=9, tokens=32)
    requests = [prompt(12, 2, item("a", 7, 2)), prompt(12, 2, item("b", 9, 2))]
    bench.run(*requests)
    assert bench.encoded == ["a", "b"]
    assert {request.finish_reason for request in requests} == {"length"}


def test_an_item_cut_by_a_chunk_stays_until_its_end() -> None:
    bench = Bench(rows=6, compute=6, tokens=5)
    request = prompt(14, 2, item("a", 6, 2), item("b", 6, 8))
    steps = bench.run(request)
    assert bench.encoded == ["a", "b"]
    # The chunk ends before "b": its room is "a"'s until position 8 is done.
    assert [chunk.stop for step in steps for chunk in step.chunks][:3] == [5, 8, 13]


def test_a_step_encodes_no_more_than_its_budget() -> None:
    bench = Bench(rows=32, compute=6, tokens=64, blocks=64)
    steps = bench.run(*[prompt(8, 2, item(str(n), 4, 1)) for n in range(3)])
    assert [len(step.encode) for step in steps[:3]] == [1, 1, 1]


def test_equal_requests_make_equal_steps() -> None:
    runs = []
    for _ in range(2):
        steps = Bench(tokens=8, rows=4, compute=4).run(*[prompt(9 + n, 3, item(str(n), 4, 2)) for n in range(4)])
        runs.append([[(chunk.start, chunk.stop, chunk.sequence.blocks) for chunk in step.chunks] for step in steps])
    assert runs[0] == runs[1]


def test_abort_gives_everything_back() -> None:
    bench = Bench()
    for request in (prompt(30, 2, item("a", 4, 1)), prompt(4)):
        bench.scheduler.add(request)
    bench.scheduler.schedule()
    bench.scheduler.abort()
    assert bench.scheduler.num_open == 0
    assert bench.pool.num_free == bench.pool.num_blocks
    assert bench.encoder.can_add(bench.encoder.capacity)


def test_tokens_of_a_request_run_from_prompt_into_output() -> None:
    request = OpenRequest([1, 2, 3], 4, output=[8, 9])
    assert [request.tokens(0, 2), request.tokens(2, 4), request.tokens(4, 5)] == [[1, 2], [3, 8], [9]]


def test_the_encoder_index_evicts_the_least_recently_used_that_nobody_needs() -> None:
    index = EncoderIndex(6)
    for name in "abc":
        index.add(name, 2)
    index.acquire("a")
    index.acquire("b")
    index.release("b")
    index.add("d", 2)
    assert [name in index for name in "abcd"] == [True, True, False, True]
    assert not index.can_add(5)
    with pytest.raises(EncoderCacheError):
        index.add("e", 5)
    index.add("e", 4)
    assert [name in index for name in "abcde"] == [True, False, False, False, True]


def test_an_item_is_released_as_often_as_it_was_acquired() -> None:
    index = EncoderIndex(2)
    index.add("a", 2)
    index.acquire("a")
    index.release("a")
    with pytest.raises(EncoderCacheError):
        index.release("a")


def test_encoder_rows_need_not_be_neighbours() -> None:
    cache = EncoderCache(6, 3, torch.float32, "cpu")
    for name in "abc":
        cache.index.add(name, 2)
    cache.index.acquire("b")
    cache.index.add("d", 4)
    rows = list(cache.index.rows("d"))
    cache.write("d", torch.arange(12.0).view(4, 3))
    assert torch.equal(cache.slab[rows], torch.arange(12.0).view(4, 3))
    assert not cache.slab[list(cache.index.rows("b"))].any()
    assert cache.bytes == 6 * 3 * 4


def picture(name: str, rows: int, at: int) -> PlacedItem:
    """An item whose encoder tokens look at each other."""
    made = item(name, rows, at)
    return PlacedItem(made.inputs, made.positions, ((at, at + rows),))


def test_no_chunk_ends_among_tokens_that_look_at_each_other() -> None:
    first, second = prompt(20, 3, picture("a", 6, 5), picture("b", 4, 13)), prompt(12, 2, picture("c", 5, 6))
    for size in range(6, 24):
        for request in (first, second):
            request.output, request.logprobs, request.finish_reason, request.computed = [], [], "", 0
        steps = Bench(tokens=size, rows=16, compute=16).run(first, second)
        for step in steps:
            for chunk in step.chunks:
                assert not any(start < chunk.stop < stop for start, stop in chunk.sequence.runs)
            assert step.num_tokens <= size
        assert (first.error, second.error, len(first.output), len(second.output)) == (None, None, 3, 2)


def test_tokens_that_look_at_each_other_and_fit_no_step_are_refused() -> None:
    request = prompt(20, 3, picture("a", 7, 5))
    Bench(tokens=6).run(request)
    assert request.error == "7 tokens of one item look at each other and need one step, and max_num_batched_tokens is 6"


def test_positions_on_axes_go_on_behind_the_prompt() -> None:
    axes = Axes(((0, 1, 1, 4, 3), (0, 1, 1, 2, 3), (0, 1, 2, 1, 3)))
    assert axes.span(1, 2, 4) == [1, 2]
    assert axes.span(2, 3, 7) == [1, 3, 4, 5]
    assert axes.span(0, 6, 8) == [5, 6]
