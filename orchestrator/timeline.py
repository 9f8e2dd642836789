"""The top-level intervals of a run, one after the other without a gap."""

from __future__ import annotations

from orchestrator.clock import Clock
from orchestrator.records import Span


class Timeline:
    """Each `mark` names what went on since the mark before; the first since the clock's zero."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.spans: list[Span] = []
        self._since = 0.0

    def mark(self, name: str, at_s: float | None = None) -> None:
        """
        Args:
            at_s: when it ended, if that is not now.
        """
        now = self.clock.now() if at_s is None else at_s
        self.spans.append(Span(name=name, start_s=self._since, wall_s=now - self._since))
        self._since = now

    def skip(self, until_s: float) -> None:
        """What went on since the last mark until then is recorded elsewhere (stages)."""
        self._since = max(self._since, until_s)
