"""Room for the encoder outputs of encoder-decoder models, whose decoder reads them at every step."""

from __future__ import annotations

from orchestrator.errors import OrchestratorError


class EncoderSlotsError(OrchestratorError):
    """Slots that were taken or given back against the rules: a defect of the caller, not of a request."""


class EncoderSlots:
    """A fixed number of slots a request, whatever its recording's length, from its admission to its end.

    Such a model pads each input to one length, and its cross-attention reads all of it until the last token: unlike an
    entry of the encoder cache, the outputs are neither shared nor evicted.

    Args:
        capacity: slots in all, one an encoder token.
        per_request: encoder tokens of one request, such as 1,500 for half a minute of speech.

    Raises:
        EncoderSlotsError: not even one request has room.
    """

    def __init__(self, capacity: int, per_request: int) -> None:
        if per_request < 1 or capacity < per_request:
            raise EncoderSlotsError(f"{capacity} encoder slots have no room for one request of {per_request}")
        self.per_request, self.most_requests = per_request, capacity // per_request
        self._free = list(range(self.most_requests - 1, -1, -1))
        self._held: dict[str, int] = {}

    @property
    def num_free(self) -> int:
        """Requests that have room now."""
        return len(self._free)

    def take(self, request_id: str) -> range:
        """A request's slots; the same for as long as it runs.

        Raises:
            EncoderSlotsError: it has slots already, or there is no room.
        """
        if request_id in self._held or not self._free:
            raise EncoderSlotsError(f"request {request_id} has encoder slots already, or none are free")
        place = self._held[request_id] = self._free.pop()
        return range(place * self.per_request, (place + 1) * self.per_request)

    def give_back(self, request_id: str) -> None:
        """Raises: EncoderSlotsError: the request holds none."""
        place = self._held.pop(request_id, None)
        if place is None:
            raise EncoderSlotsError(f"request {request_id} holds no encoder slots")
        self._free.append(place)
