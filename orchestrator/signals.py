"""Ctrl-C and SIGTERM as an exception that every `with` and `finally` sees, and that comes only where it is expected."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from orchestrator.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_DIES_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of the kernel."""


class _Handler:
    """Raises `Interrupted` at the first signal, or keeps it while `held`."""

    def __init__(self) -> None:
        self.held = False
        self.first: Callable[[int], None] | None = None
        self._came: int | None = None
        self.raised: Interrupted | None = None

    def __call__(self, signum: int, _frame: FrameType | None) -> None:
        if self._came is None:
            act, self.first = self.first, None
            if act is not None:
                act(signum)
            self._came = signum
            self.deliver()

    def deliver(self) -> None:
        if self._came is not None and self.raised is None and not self.held:
            self.raised = Interrupted(self._came)
            raise self.raised


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise `Interrupted` in the main thread at the first SIGINT or SIGTERM. Later ones do not cut short what unwinds
    then, the record above all; see `second_signal`. Does nothing in another thread, which gets no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = _Handler()
    previous = {each: signal.signal(each, handler) for each in SIGNALS}
    try:
        yield
    except Exception:
        # A library that fails to clean up on the way of it hides it.
        if handler.raised is not None:
            raise handler.raised from None
        raise
    finally:
        for each, before in previous.items():
            signal.signal(each, before if before is not None else signal.SIG_DFL)


def owns_process() -> bool:
    """Whether this program is the process, rather than called by one: it may end it then."""
    return _handler() is not None


@contextmanager
def held_back() -> Iterator[None]:
    """A signal that comes meanwhile is raised at the end."""
    yield from _with_held(True)


@contextmanager
def let_through() -> Iterator[None]:
    """Within `held_back`: signals are raised here, also one that has come before."""
    yield from _with_held(False)


def _with_held(held: bool) -> Iterator[None]:
    handler = _handler()
    if handler is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = handler.held
    handler.held = held
    try:
        handler.deliver()
        yield
    finally:
        handler.held = before
    handler.deliver()


@contextmanager
def second_signal(act: Callable[[Interrupted], None]) -> Iterator[None]:
    """Call `act` at the second signal, in a thread of its own: what unwinds after the first may hang, even in C."""
    if not owns_process() or threading.current_thread() is not threading.main_thread():
        yield
        return
    receives, sends = os.pipe()
    os.set_blocking(sends, False)
    listener = threading.Thread(target=_listen, args=(receives, act), name="second signal", daemon=True)
    listener.start()
    previous = signal.set_wakeup_fd(sends, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        os.write(sends, b"\0")
        listener.join()
        os.close(sends)
        os.close(receives)


@contextmanager
def before_interruption(act: Callable[[int], None]) -> Iterator[None]:
    """Call `act` with the number of the first signal, before anything is raised for it. A second one cuts it short."""
    handler = _handler()
    if handler is not None:
        handler.first = act
    try:
        yield
    finally:
        if handler is not None:
            handler.first = None


def _listen(receives: int, act: Callable[[Interrupted], None]) -> None:
    """Python writes a byte, the signal's number, before any handler runs; a zero is the end."""
    count = 0
    while (byte := os.read(receives, 1)) not in (b"", b"\0"):
        if byte[0] in SIGNALS:
            count += 1
            if count == 2:
                act(Interrupted(byte[0]))


def _handler() -> _Handler | None:
    found = signal.getsignal(signal.SIGTERM)
    return found if isinstance(found, _Handler) else None


def end_with_parent(parent: int) -> bool:
    """Ask the kernel for SIGTERM once the parent is gone; whether it is still there. Linux only; elsewhere nothing."""
    if sys.platform != "linux":
        return True
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGTERM)
    return os.getppid() == parent
