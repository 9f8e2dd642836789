"""Requests become prompts only shortly before they run, so that waiting ones hold no pixels and no samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from orchestrator.engine.base import Request
from orchestrator.engine.generate import Scheduler
from orchestrator.engine.step import OpenRequest
from orchestrator.units import MiB

AHEAD_BYTES = 256 * MiB
"""Host memory that the media of waiting requests may take; a single request may pass it."""


class Feed:
    """Opens requests in their order, as the scheduler comes to need them.

    Args:
        open_request: makes the prompt of a request; one that cannot be served comes back with its error.
        ahead: requests that may wait in the scheduler at once; at least 1.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        open_request: Callable[[Request], OpenRequest],
        scheduler: Scheduler,
        ahead: int,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:
        self._coming, self._open, self._scheduler = iter(requests), open_request, scheduler
        self._ahead, self._ahead_bytes = ahead, ahead_bytes
        self.opened: list[OpenRequest] = []
        """In the order of the requests."""

    def refill(self) -> None:
        """Open as many as there is room for: at least one, if any is left and none waits."""
        while self._has_room():
            request = next(self._coming, None)
            if request is None:
                return
            sequence = self._open(request)
            self.opened.append(sequence)
            if not sequence.finish_reason:
                self._scheduler.add(sequence)

    def _has_room(self) -> bool:
        waiting = self._scheduler.waiting
        held = sum(item.inputs.num_bytes for sequence in waiting for item in sequence.items)
        return not waiting or (len(waiting) < self._ahead and held < self._ahead_bytes)
