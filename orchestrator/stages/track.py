"""Track: give the figures of the run to a tracker, once its record is written, also where the start failed."""

from __future__ import annotations

import inspect
from typing import Any

from pydantic import Field

from orchestrator.config import Config as RootConfig
from orchestrator.errors import PluginError
from orchestrator.stage import Context, Resolver, Stage, StageConfig
from orchestrator.tracking import FinishedRun, Tracker
from orchestrator.validation import validate


class TrackConfig(StageConfig):
    tracker: str
    """A name in the registry's group `trackers`, or `module:Class`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The tracker's own."""


class Track(Stage[TrackConfig]):
    """Does nothing at its place in the pipeline; what it does comes at the end, wherever that is."""

    Config = TrackConfig

    def check(self, config: RootConfig, resolve: Resolver) -> None:
        self._tracker(resolve).check()

    def run(self, ctx: Context) -> str:
        return f"{self.config.tracker} is told at the end"

    def concluded(self, run: FinishedRun, resolve: Resolver) -> str:
        return self._tracker(resolve).log(run)

    def _tracker(self, resolve: Resolver) -> Tracker:
        cls = resolve("trackers", self.config.tracker)
        if not (isinstance(cls, type) and issubclass(cls, Tracker)) or inspect.isabstract(cls):
            raise PluginError(f"{self.config.tracker} is not a subclass of orchestrator.Tracker that has a method log")
        return validate(cls, self.config.options, f"the tracker {self.config.tracker}: options")
