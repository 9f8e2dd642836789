"""Seconds that imports take, by package, wherever in a run they happen."""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, TracebackType
from typing import Any


@dataclass(frozen=True)
class PackageTime:
    """Seconds of a top-level package, and of the modules and packages right below it, the slowest first."""

    package: str
    s: float
    parts: dict[str, float]


class ImportTimer:
    """While it is entered, times every module that its thread imports from a file.

    A package's time is its own: what it pulls in of other packages counts for those.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._running: list[str] = []
        self._since = 0.0
        self._thread = threading.get_ident()

    def __enter__(self) -> ImportTimer:
        sys.meta_path.insert(0, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.meta_path.remove(self)

    def packages(self) -> list[PackageTime]:
        """What was imported so far, the slowest package first."""
        parts: dict[str, dict[str, float]] = defaultdict(dict)
        for name, seconds in sorted(self._seconds.items(), key=lambda item: -item[1]):
            parts[name.partition(".")[0]][name] = seconds
        found = [PackageTime(package, sum(below.values()), below) for package, below in parts.items()]
        return sorted(found, key=lambda each: -each.s)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if threading.get_ident() != self._thread:
            return None
        spec = PathFinder.find_spec(name, path, target)
        # Python's own loaders keep an attribute; a foreign one may not, and then goes untimed.
        if spec is not None and hasattr(spec.loader, "exec_module") and hasattr(spec.loader, "__dict__"):
            self._time(spec.loader, ".".join(name.split(".")[:2]))
        return spec

    def _time(self, loader: Any, part: str) -> None:
        original = loader.exec_module

        def timed(module: ModuleType) -> None:
            del loader.exec_module
            self._switch()
            self._running.append(part)
            try:
                original(module)
            finally:
                self._switch()
                self._running.pop()

        loader.exec_module = timed

    def _switch(self) -> None:
        """Book the time since the last switch on the part that was running."""
        now = time.perf_counter()
        if self._running:
            self._seconds[self._running[-1]] += now - self._since
        self._since = now
