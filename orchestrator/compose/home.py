"""The sweep's own process as a worker of its launcher sees it, which may be on another machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Home:
    """A process, and where its number means something; `place` is empty where that is not known."""

    pid: int
    place: str

    @classmethod
    def here(cls) -> Home:
        return cls(os.getpid(), _place())

    @property
    def pid_here(self) -> int | None:
        """Its number; None for a process elsewhere."""
        return self.pid if self.place and self.place == _place() else None

    @property
    def is_gone(self) -> bool:
        """Whether it is known to have ended."""
        return self.pid_here is not None and not psutil.pid_exists(self.pid)


def _place() -> str:
    """Which boot of which machine, and which of its numberings of processes."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
