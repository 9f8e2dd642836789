"""Requests become prompts shortly before they run: worker threads prepare media meanwhile, and few are held at once."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from orchestrator.engine.base import Request
from orchestrator.engine.generate import Scheduler
from orchestrator.engine.step import OpenRequest
from orchestrator.units import MiB

AHEAD_BYTES = 256 * MiB
"""Host memory that the media of waiting requests may take; those that are being made, and a single one, may pass it."""


def worker_count() -> int:
    """Threads that media are prepared on: one a core that this process may use, 8 at most."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, cores)


class Feed:
    """Opens requests in their order, as the scheduler comes to need them. `close` ends its threads.

    Where any request has media, worker threads open them ahead, while steps run. What joins the scheduler when does not
    depend on how fast they are, so that the same requests make the same steps: before each step as many join as could
    be in it, and it waits for those.

    Args:
        open_request: makes the prompt of a request; one that cannot be served comes back with its error. With workers
            it is called from several threads.
        ahead: requests that may wait in the scheduler at once; at least 1.
        workers: threads; with 0 there are none.
        step_tokens: tokens of a step: more need not wait.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        open_request: Callable[[Request], OpenRequest],
        scheduler: Scheduler,
        ahead: int,
        ahead_bytes: int = AHEAD_BYTES,
        workers: int = 0,
        step_tokens: int = sys.maxsize,
    ) -> None:
        self._coming, self._open, self._scheduler = deque(requests), open_request, scheduler
        self._ahead, self._ahead_bytes, self._step_tokens = ahead, ahead_bytes, step_tokens
        threads = workers if any(request.media for request in self._coming) else 0
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="media") if threads else None
        # Twice as many as threads, so that none waits for the next step to be given something to do.
        self._most_started = 2 * threads
        self._started: deque[Future[OpenRequest]] = deque()
        """Of the first requests of `_coming`, in their order."""
        self.opened: list[OpenRequest] = []
        """In the order of the requests."""

    def refill(self) -> None:
        """Open as many as there is room for: at least one, if any is left and none waits."""
        self._start()
        while self._coming and self._has_room():
            self._take()
            self._start()

    @property
    def is_done(self) -> bool:
        """Whether every request was opened."""
        return not self._coming

    def close(self) -> None:
        """End the threads; what they have not begun is left. May be called again."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _start(self) -> None:
        """Give requests to the threads, as far as those may run ahead."""
        if self._pool is None:
            return
        while len(self._started) < min(self._most_started, len(self._coming)) and self._has_memory():
            request = self._coming[len(self._started)]
            self._started.append(self._pool.submit(self._open, request))

    def _has_memory(self) -> bool:
        done = (future.result() for future in self._started if future.done() and not future.exception())
        held = sum(_num_bytes(sequence) for sequence in (*self._scheduler.waiting, *done))
        return not self._started or held < self._ahead_bytes

    def _take(self) -> None:
        request = self._coming[0]
        sequence = self._started.popleft().result() if self._started else self._open(request)
        self._coming.popleft()
        self.opened.append(sequence)
        if not sequence.finish_reason:
            self._scheduler.add(sequence)

    def _has_room(self) -> bool:
        waiting = self._scheduler.waiting
        if not waiting:
            return True
        held = sum(_num_bytes(sequence) for sequence in waiting)
        tokens = sum(len(sequence.prompt) for sequence in waiting)
        return len(waiting) < self._ahead and held < self._ahead_bytes and tokens < self._step_tokens


def _num_bytes(sequence: OpenRequest) -> int:
    return sum(item.inputs.num_bytes for item in sequence.items)
