"""The end of a process that cannot be ended in order: its record is left first."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from orchestrator.errors import Interrupted, StageError

_ATTEMPTS = 3


class LastWords:
    """Called with what ended the run, from any thread: writes the record, then ends the process at once.

    Args:
        write: writes the record as it stands.
        ends_process: False where the process belongs to another program: it only writes then.
    """

    def __init__(self, write: Callable[[StageError | Interrupted], None], *, ends_process: bool) -> None:
        self._write, self._ends_process = write, ends_process
        self._lock = threading.Lock()
        self._written = False

    @contextmanager
    def not_needed(self) -> Iterator[None]:
        """While the record is written in order; after it, only the process is left to end."""
        with self._lock:
            yield
            self._written = True

    def __call__(self, error: StageError | Interrupted) -> None:
        with self._lock:
            if not self._written:
                self._try_to_write(error)
        if self._ends_process:
            # The main thread may hold the lock of sys.stderr.
            os.write(2, f"error: {error}; the process was ended\n".encode())
            os._exit(error.exit_code)

    def _try_to_write(self, error: StageError | Interrupted) -> None:
        """The main thread may change the record meanwhile."""
        for _ in range(_ATTEMPTS):
            with suppress(RuntimeError):
                self._write(error)
                self._written = True
                return
