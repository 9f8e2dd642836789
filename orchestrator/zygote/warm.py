"""What the import server keeps imported, and whether that is still what lies on the disk."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from orchestrator.importing import import_all, without_collections

AT_IMPORT = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "OPENBLAS_NUM_THREADS": "1"}
"""For the server's own imports: the driver's management library is asked whether there is a GPU, because a CUDA
context, even an attempt at one, does not survive a fork; and numpy makes no threads, which do not either."""

_Stamp = tuple[int, int]


class Warm:
    """The modules of this process."""

    def __init__(self) -> None:
        self.import_s = 0.0
        self._stamps: dict[str, _Stamp | None] = {}

    def load(self) -> None:
        """Import what any start needs, and compose once, which fills the parsers' tables."""
        begin = time.monotonic()
        with without_collections(keeps_all=True):
            _import_everything()
        self.import_s = time.monotonic() - begin
        self._remember()

    def learn(self, names: Iterable[str]) -> None:
        """Import what a start had to import itself, if it is a part of a package that is here already: another one's
        may be found elsewhere next time."""
        new = [name for name in names if name not in sys.modules and name.partition(".")[0] in sys.modules]
        if not new:
            return
        with without_collections(keeps_all=True):
            for name in new:
                with suppress(Exception):
                    importlib.import_module(name)
        self._remember()

    def changed(self) -> str | None:
        """The first file that is not what was imported; None while all are."""
        return next((path for path, stamp in self._stamps.items() if _stamp(path) != stamp), None)

    def _remember(self) -> None:
        for module in list(sys.modules.values()):
            path = getattr(module, "__file__", None)
            if isinstance(path, str) and path not in self._stamps:
                self._stamps[path] = _stamp(path)
        gc.freeze()


def threads() -> int:
    """Threads of this process, of libraries too: none but the first survives a fork."""
    return len(list(Path("/proc/self/task").iterdir()))


def _import_everything() -> None:
    from orchestrator.compose import compose
    from orchestrator.config import engine_name
    from orchestrator.engine.base import Primes
    from orchestrator.environment import versions
    from orchestrator.registry import Registry
    from orchestrator.sources import own_code, sources_hash

    import_all(("orchestrator.__main__", "orchestrator.app", "orchestrator.compose.sweep"))
    registry = Registry.discover()
    config = compose([], registry=registry).config
    for plugin in registry.plugins():
        if plugin.origin == "built-in":
            # An extra that is not installed; a start that asks for it says so.
            with suppress(ImportError):
                importlib.import_module(plugin.value.partition(":")[0])
    engine = registry.resolve("engines", engine_name(config))
    import_all(engine.imports(config))
    if isinstance(engine, Primes):
        engine.prime()
    # Remembered by the files' state on the disk, which each start looks at.
    own_code()
    sources_hash()
    versions()


def _stamp(path: str) -> _Stamp | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - thousands of them, for every start
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
