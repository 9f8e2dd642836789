"""Encoder outputs of any size and modality over a small cache: refused at once, or served, and never stuck."""

from __future__ import annotations

import random

import pytest

from orchestrator.engine.encoder_cache import EncoderIndex
from orchestrator.engine.encoder_slots import EncoderSlots, EncoderSlotsError
from orchestrator.engine.generate import Limits, Scheduler, run_all
from orchestrator.engine.kv_cache import BlockPool
from orchestrator.engine.step import OpenRequest, PlacedItem, Step
from orchestrator.modality.base import MediaInputs


def placed(modality: str, name: str, rows: int, at: int) -> PlacedItem:
    inputs = MediaInputs(modality, [0] * rows, [True] * rows, {}, name)
    return PlacedItem(inputs, tuple(range(at, at + rows)))


def asking(*items: tuple[str, str, int], text: int = 3, max_tokens: int = 2) -> OpenRequest:
    """A prompt of items (modality, content, rows) with `text` tokens before each and at the end."""
    at, lying = 0, []
    for modality, name, rows in items:
        lying.append(placed(modality, name, rows, at + text))
        at += text + rows
    return OpenRequest([1] * (at + text), max_tokens, tuple(lying))


def serve(
    requests: list[OpenRequest], *, cache: int, compute: int, tokens: int, seqs: int = 8, blocks: int = 4096
) -> list[Step]:
    """Every step until all have ended. Within each, what a chunk needs is in the cache, and nothing is over budget."""
    pool, index = BlockPool(blocks), EncoderIndex(cache)
    scheduler = Scheduler(Limits(10**6, seqs, tokens, compute), 64, pool, index)
    for request in requests:
        scheduler.add(request)
    steps = []
    for step in run_all(scheduler):
        assert step.chunks and step.num_tokens <= tokens
        assert sum(item.num_embeds for item in step.encode) <= compute
        needed = [
            item
            for chunk in step.chunks
            for item in chunk.sequence.items
            if item.first < chunk.stop and item.stop > chunk.start
        ]
        rows = {item.inputs.content_hash: index.rows(item.inputs.content_hash) for item in needed}
        taken = [row for held in rows.values() for row in held]
        assert len(taken) == len(set(taken)) <= cache
        assert {each.content_hash for each in step.encode} <= set(rows)
        scheduler.complete(step, [(7, -1.0) for chunk in step.chunks if chunk.samples])
        steps.append(step)
    assert pool.num_free == pool.num_blocks
    assert index.can_add(cache)
    return steps


def test_an_item_larger_than_the_cache_is_refused_at_once_with_both_numbers() -> None:
    request, other = asking(("image", "a", 6042)), asking(("image", "b", 100))
    steps = serve([request, other], cache=4800, compute=8192, tokens=8192)
    assert request.error == "one image has 6042 encoder tokens, and the encoder cache holds 4800"
    assert (other.finish_reason, len(steps)) == ("length", 2)


def test_an_item_larger_than_what_was_profiled_is_refused_with_both_numbers() -> None:
    index = EncoderIndex(8192)
    limits = Limits(10**6, 8, 8192, 8192, most_item_tokens={"video": 2048})
    scheduler = Scheduler(limits, 64, BlockPool(4096), index)
    large, fits, unprofiled = asking(("video", "a", 4096)), asking(("video", "b", 2048)), asking(("image", "c", 4096))
    for request in (large, fits, unprofiled):
        scheduler.add(request)
    assert large.error == "one video has 4096 encoder tokens, and memory was reserved for 2048 at most"
    assert scheduler.num_open == 2


def test_two_videos_that_do_not_fit_together_are_served_one_after_the_other() -> None:
    videos = [asking(("video", "a", 183_600)), asking(("video", "b", 221_184))]
    steps = serve(videos, cache=229_376, compute=229_376, tokens=65_536, blocks=8192)
    assert [request.finish_reason for request in videos] == ["length", "length"]
    assert [[item.content_hash for item in step.encode] for step in steps if step.encode] == [["a"], ["b"]]


def test_three_requests_that_fill_a_cache_of_two_items_all_go_on() -> None:
    requests = [asking(("image", f"{n}a", 100), ("image", f"{n}b", 100)) for n in range(3)]
    steps = serve(requests, cache=200, compute=200, tokens=64)
    assert {request.finish_reason for request in requests} == {"length"}
    assert len([item for step in steps for item in step.encode]) == 6


@pytest.mark.parametrize("seed", range(40))
def test_any_mix_ends_and_no_step_is_empty(seed: int) -> None:
    """Requests with items of several modalities and sizes, some of them shared, over caches of any size that the
    largest item fits."""
    draw = random.Random(seed)
    sizes = {"image": 13 * draw.randint(1, 8), "video": draw.randint(1, 400), "audio": draw.randint(1, 75)}
    largest = max(sizes.values())
    requests = []
    for number in range(draw.randint(1, 12)):
        kinds = draw.choices(sorted(sizes), k=draw.randint(0, 5))
        items = [
            (kind, f"{kind} {draw.randint(0, 3)}", sizes[kind])
            if draw.random() < 0.5
            else (kind, f"{number} {at}", draw.randint(1, sizes[kind]))
            for at, kind in enumerate(kinds)
        ]
        requests.append(asking(*items, text=draw.randint(1, 9), max_tokens=draw.randint(1, 5)))
    serve(
        requests,
        cache=largest + draw.randint(0, 2 * largest),
        compute=largest + draw.randint(0, largest),
        tokens=draw.randint(1, 300),
        seqs=draw.randint(1, 6),
    )
    assert {request.finish_reason for request in requests} == {"length"}


def test_what_is_in_the_cache_lets_go_of_its_pixels() -> None:
    import torch

    inputs = MediaInputs("image", [0] * 4, [True] * 4, {"pixel_values": torch.zeros(2, 3)}, "a")
    request = OpenRequest([1] * 8, 2, (PlacedItem(inputs, (2, 3, 4, 5)),))
    held = []
    scheduler = Scheduler(Limits(64, 1, 4, 8), 4, BlockPool(8), EncoderIndex(8))
    scheduler.add(request)
    for step in run_all(scheduler):
        scheduler.complete(step, [(7, -1.0) for chunk in step.chunks if chunk.samples])
        held.append(request.items[0].inputs.num_bytes)
    assert held[0] == inputs.num_bytes > 0 == held[-1]
    assert request.items[0].inputs.num_embeds == 4


def test_encoder_slots_are_a_fixed_number_a_request_until_its_end() -> None:
    slots = EncoderSlots(4000, 1500)
    assert (slots.most_requests, slots.num_free) == (2, 2)
    first, second = slots.take("a"), slots.take("b")
    assert (first, second) == (range(1500), range(1500, 3000))
    with pytest.raises(EncoderSlotsError, match=r"request c .* none are free"):
        slots.take("c")
    slots.give_back("a")
    assert slots.take("c") == first
    with pytest.raises(EncoderSlotsError, match="request a holds no encoder slots"):
        slots.give_back("a")
    with pytest.raises(EncoderSlotsError, match="request b has encoder slots already"):
        slots.take("b")


@pytest.mark.parametrize(("capacity", "per_request"), [(1499, 1500), (10, 0)])
def test_encoder_slots_must_hold_one_request(capacity: int, per_request: int) -> None:
    with pytest.raises(EncoderSlotsError, match=f"{capacity} encoder slots have no room for one"):
        EncoderSlots(capacity, per_request)
