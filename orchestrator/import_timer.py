"""Seconds that imports take, by top-level package, wherever in a run they happen."""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, TracebackType
from typing import Any


class ImportTimer:
    """While it is entered, times every module that its thread imports from a file.

    `seconds` has each package's own time: what it pulls in of other packages counts for those.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
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

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if threading.get_ident() != self._thread:
            return None
        spec = PathFinder.find_spec(name, path, target)
        # Python's own loaders keep an attribute; a foreign one may not, and then goes untimed.
        if spec is not None and hasattr(spec.loader, "exec_module") and hasattr(spec.loader, "__dict__"):
            self._time(spec.loader, name.partition(".")[0])
        return spec

    def _time(self, loader: Any, package: str) -> None:
        original = loader.exec_module

        def timed(module: ModuleType) -> None:
            del loader.exec_module
            self._switch()
            self._running.append(package)
            try:
                original(module)
            finally:
                self._switch()
                self._running.pop()

        loader.exec_module = timed

    def _switch(self) -> None:
        """Book the time since the last switch on the package that was running."""
        now = time.perf_counter()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._since = now
