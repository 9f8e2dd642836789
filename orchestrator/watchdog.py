"""A stage that takes longer than its limit is interrupted where it stands, and what it was doing is told."""

from __future__ import annotations

import ctypes
import faulthandler
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TypeVar

from orchestrator.errors import StageTimeoutError

GRACE_S = 5.0
"""Seconds that a stage has to unwind after it was interrupted."""

_SIGNAL = signal.SIGUSR2
_FRAMES = 5

T = TypeVar("T")


class _TimeIsUp(BaseException):
    """Raised in the stage's thread. Not an Exception, so that no library swallows it."""


def run_within(
    seconds: float | None,
    work: Callable[[], T],
    *,
    slot: str,
    open_spans: Sequence[str],
    abandon: Callable[[StageTimeoutError], None],
    ends_process: bool,
) -> T:
    """What `work` returns, if it returns within `seconds` (None: however long it takes).

    Args:
        open_spans: names of the spans that the stage is in, innermost last.
        abandon: called, in another thread, when the work has not even ended GRACE_S after it was interrupted; a call
            into C that does not return cannot be interrupted.
        ends_process: end the process if not even `abandon` can run, because a call into C keeps the interpreter.

    Raises:
        StageTimeoutError: the work took longer, whatever it did then.
    """
    if seconds is None:
        return work()
    watch = _Watch(seconds, slot, open_spans, abandon)
    # Not a context manager: an exception that comes between the block and `__exit__` would get past it.
    try:
        try:
            watch.start(ends_process)
            result = work()
        finally:
            watch.stop()
    except _TimeIsUp:
        watch.stop()
        assert watch.error is not None
        raise watch.error from None
    except Exception as error:
        if watch.error is None:
            raise
        raise watch.error from error
    if watch.error is not None:
        raise watch.error
    return result


class _Watch:
    """One limit on the thread that makes it."""

    def __init__(
        self,
        seconds: float,
        slot: str,
        open_spans: Sequence[str],
        abandon: Callable[[StageTimeoutError], None],
    ) -> None:
        self.error: StageTimeoutError | None = None
        self._seconds, self._slot, self._open_spans, self._abandon = seconds, slot, open_spans, abandon
        self._ident = threading.get_ident()
        # A signal also ends a sleep or a wait for a lock, but only the main thread gets one.
        self._by_signal = threading.current_thread() is threading.main_thread()
        self._previous: signal.Handlers | Callable[[int, FrameType | None], object] | int | None = None
        self._ended, self._firing = threading.Event(), threading.Lock()
        self._last_resort = False

    def start(self, ends_process: bool) -> None:
        if self._by_signal:
            self._previous = signal.signal(_SIGNAL, self._raise)
        if ends_process:
            faulthandler.dump_traceback_later(self._seconds + 2 * GRACE_S, exit=True)
            self._last_resort = True
        threading.Thread(target=self._wait, name=f"watchdog {self._slot}", daemon=True).start()

    def stop(self) -> None:
        """From here on nothing is raised any more, except once more inside here. May be called twice."""
        self._ended.set()
        with self._firing:
            if self.error is not None and not self._by_signal:
                take_back()
        if self._last_resort:
            faulthandler.cancel_dump_traceback_later()
            self._last_resort = False
        if self._previous is not None:
            signal.signal(_SIGNAL, self._previous)
            self._previous = None

    def _wait(self) -> None:
        if self._ended.wait(self._seconds):
            return
        with self._firing:
            if self._ended.is_set():
                return
            place = _place(self._ident)
            span = self._open_spans[-1] if self._open_spans else None
            self.error = StageTimeoutError(self._slot, self._seconds, place, span)
            self._interrupt()
        if not self._ended.wait(GRACE_S):
            self._abandon(self.error)

    def _interrupt(self) -> None:
        if self._by_signal:
            signal.pthread_kill(self._ident, _SIGNAL)
        else:
            raise_in(self._ident, _TimeIsUp)

    def _raise(self, _signum: int, _frame: FrameType | None) -> None:
        if self.error is not None:
            raise _TimeIsUp


class _TakenBack(BaseException):
    """Raised in the place of what is not to be raised any more."""


def raise_in(ident: int, error: type[BaseException]) -> None:
    """Raise in a thread, soon: where Python next looks whether there is something to be done."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(error))


def take_back() -> None:
    """What was to be raised in this thread, and has not been yet, never is.

    It is replaced and let come, not unset: up to Python 3.12 that would leave the interpreter looking for it at every
    call and loop from then on, in all threads (and never come back under a profiler on 3.11).
    """
    try:
        raise_in(threading.get_ident(), _TakenBack)
        while True:
            pass
    except _TakenBack:
        pass


def _place(ident: int) -> list[str]:
    """Where a thread stands, innermost first."""
    frame = sys._current_frames().get(ident)
    stack = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=_FRAMES, lookup_lines=False)
    return (
        [f"{'/'.join(Path(line.filename).parts[-2:])}:{line.lineno} in {line.name}" for line in stack] if frame else []
    )
