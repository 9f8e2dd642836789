"""Requests on their way through one scheduler, from the first step to the last word."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing

from orchestrator.engine.base import Event, Request
from orchestrator.engine.encoder_cache import EncoderIndex
from orchestrator.engine.feed import AHEAD_BYTES, Feed
from orchestrator.engine.generate import Scheduler, run_all
from orchestrator.engine.step import OpenRequest, Step


class Serving:
    """One call's requests. Whatever ends it, what they hold goes back and no thread is left.

    Args:
        open_request: see `Feed`.
        execute: runs a step; a token and its log-probability for each chunk that samples.
        encoder: what the scheduler keeps encoder outputs by; emptied when a run breaks off.
        ahead: see `Feed`.
        workers: see `Feed`.
        step_tokens: see `Feed`.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        open_request: Callable[[Request], OpenRequest],
        scheduler: Scheduler,
        execute: Callable[[Step], list[tuple[int, float]]],
        encoder: EncoderIndex,
        *,
        ahead: int,
        workers: int,
        step_tokens: int,
    ) -> None:
        self._open, self._scheduler, self._execute = open_request, scheduler, execute
        self._encoder = encoder
        self._feed = Feed(requests, self._open_unless_cancelled, scheduler, ahead, AHEAD_BYTES, workers, step_tokens)
        self._cancelled: set[str] = set()
        self._announced = 0
        self._ended: list[OpenRequest] = []

    @property
    def sequences(self) -> Sequence[OpenRequest]:
        """Those that were opened, in the order of the requests."""
        return self._feed.opened

    def cancel(self, request_id: str) -> None:
        """End the request before its next step. May be called from any thread."""
        self._cancelled.add(request_id)

    def run(self) -> Generator[OpenRequest]:
        """Each sequence whenever it has a new token or is finished."""
        try:
            for step in run_all(self._scheduler, self._refill):
                self._scheduler.complete(step, self._execute(step))
                yield from [each.sequence for each in step.chunks if each.sequence.told < len(each.sequence.output)]
                yield from self._without_a_step()
            yield from self._without_a_step()
        finally:
            self._feed.close()
            if self._scheduler.num_open:
                # An entry of a step that broke off may never have been written.
                self._scheduler.abort()
                self._encoder.clear()

    def events(self) -> Iterator[Event]:
        """What `run` finds, as events."""
        with closing(self.run()) as news:
            for sequence in news:
                yield _event(sequence)

    def _open_unless_cancelled(self, request: Request) -> OpenRequest:
        if request.request_id in self._cancelled:
            return OpenRequest([], request.max_tokens, request_id=request.request_id, finish_reason="cancelled")
        return self._open(request)

    def _refill(self) -> None:
        while True:
            self._feed.refill()
            if self._cancelled:
                self._ended += self._scheduler.cancel(lambda sequence: sequence.request_id in self._cancelled)
            if self._scheduler.num_open or self._feed.is_done:
                return

    def _without_a_step(self) -> list[OpenRequest]:
        """Sequences that ended since the last call though they were in no step: refused, or cancelled."""
        fresh = self._feed.opened[self._announced :]
        self._announced = len(self._feed.opened)
        refused = [sequence for sequence in fresh if sequence.finish_reason and not sequence.output]
        ended, self._ended = self._ended, []
        known = {id(sequence) for sequence in refused}
        return [*refused, *(sequence for sequence in ended if id(sequence) not in known)]


def _event(sequence: OpenRequest) -> Event:
    begin, sequence.told = sequence.told, len(sequence.output)
    text = ""
    if sequence.text is not None:
        if sequence.finish_reason:
            sequence.text.finish()
        text = sequence.text.take()
    return Event(
        request_id=sequence.request_id,
        token_ids=tuple(sequence.output[begin:]),
        logprobs=tuple(sequence.logprobs[begin:]),
        text=text,
        finish_reason=sequence.finish_reason,
        error=sequence.error,
    )
