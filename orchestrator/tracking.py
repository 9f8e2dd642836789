"""What a tracker is: where the figures of finished runs are collected, for a person who looks at many of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict


@dataclass(frozen=True)
class FinishedRun:
    """A run whose record is written.

    Attributes:
        status: `ok`, `failed` or `interrupted`.
        folder: of the run; `run.json` is in it.
        settings: configuration, versions and device as text, by dotted names; without secrets.
        numbers: seconds, bytes and counts, by their dotted names in the record.
    """

    run_id: str
    status: str
    folder: Path
    settings: Mapping[str, str]
    numbers: Mapping[str, float]

    @property
    def record(self) -> Path:
        return self.folder / "run.json"


class Tracker(BaseModel, ABC):
    """A plugin of the group `orchestrator.trackers`. Its fields are its options, with their defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def check(self) -> None:
        """Refuse what cannot work, before anything is started.

        Raises:
            UserError: what it needs is not installed.
        """
        return

    @abstractmethod
    def log(self, run: FinishedRun) -> str:
        """Store the run; where it is, for people."""
