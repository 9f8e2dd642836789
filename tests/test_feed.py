"""Requests are opened as they are needed: memory is bounded, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from orchestrator.engine.base import Request
from orchestrator.engine.encoder_cache import EncoderIndex
from orchestrator.engine.feed import Feed
from orchestrator.engine.generate import Limits, Scheduler, run_all
from orchestrator.engine.kv_cache import BlockPool
from orchestrator.engine.step import OpenRequest, PlacedItem
from orchestrator.modality.base import MediaInputs

PIXELS = 1000
ITEM_BYTES = 4 * PIXELS


def with_a_picture(request: Request) -> OpenRequest:
    inputs = MediaInputs("image", [0] * 4, [True] * 4, {"pixel_values": torch.zeros(PIXELS)}, request.request_id)
    if request.text == "wrong":
        return OpenRequest([], 1, finish_reason="error", error="wrong")
    return OpenRequest([1] * 6, 3, (PlacedItem(inputs, (1, 2, 3, 4)),))


def serve(
    requests: list[Request], ahead: int, ahead_bytes: int, opened: Callable[[Request], OpenRequest] = with_a_picture
) -> tuple[list[OpenRequest], int, list[int]]:
    """The opened requests, the most bytes of media that were held at once, and how many waited before each step."""
    scheduler = Scheduler(Limits(64, 4, 16, 16), 4, BlockPool(64), EncoderIndex(16))
    feed = Feed(requests, opened, scheduler, ahead, ahead_bytes)
    most, waited = 0, []

    def refill() -> None:
        nonlocal most
        feed.refill()
        held = sum(item.inputs.num_bytes for sequence in feed.opened for item in sequence.items)
        most = max(most, held)
        waited.append(len(scheduler.waiting))

    for step in run_all(scheduler, refill):
        scheduler.complete(step, [(7, -1.0) for chunk in step.chunks if chunk.samples])
    return feed.opened, most, waited


def asked(count: int) -> list[Request]:
    return [Request(str(number), "wrong" if number % 7 == 3 else "right") for number in range(count)]


def test_a_thousand_requests_hold_no_more_than_a_few() -> None:
    opened, most, waited = serve(asked(1000), ahead=4, ahead_bytes=1 << 30)
    assert len(opened) == 1000
    # Four wait and four run, of which some have not been encoded.
    assert most <= 8 * ITEM_BYTES
    assert max(waited) == 4


def test_bytes_bound_what_waits_too() -> None:
    _, most, waited = serve(asked(200), ahead=64, ahead_bytes=2 * ITEM_BYTES)
    assert max(waited) == 2
    assert most <= 6 * ITEM_BYTES


def test_one_request_may_pass_the_bound() -> None:
    opened, _, waited = serve(asked(20), ahead=64, ahead_bytes=1)
    assert max(waited) == 1
    assert all(sequence.finish_reason for sequence in opened)


def test_the_order_is_that_of_the_requests_and_errors_stay_alone() -> None:
    opened, _, _ = serve(asked(30), ahead=2, ahead_bytes=1 << 30)
    assert [sequence.error for sequence in opened] == ["wrong" if n % 7 == 3 else None for n in range(30)]
    assert all(len(sequence.output) == (0 if sequence.error else 3) for sequence in opened)


def test_only_wrong_requests_end_too() -> None:
    opened, _, _ = serve([Request(str(n), "wrong") for n in range(9)], ahead=2, ahead_bytes=1)
    assert [sequence.error for sequence in opened] == ["wrong"] * 9


def test_no_requests() -> None:
    assert serve([], ahead=2, ahead_bytes=1) == ([], 0, [0])
