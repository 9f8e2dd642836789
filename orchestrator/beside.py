"""Work in threads beside the stages of a start: begun at a known moment, waited for where it is needed.

Only what leaves the interpreter alone gains by it: reading files, the driver's calls, what libraries compute outside
Python. A start is the same without: whatever was not begun here is done at its place in the order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, Generic, TypeVar

from orchestrator.clock import Clock
from orchestrator.records import Span
from orchestrator.watchdog import raise_in, take_back

T = TypeVar("T")
V = TypeVar("V")

GRACE_S = 5.0
"""Seconds that work has to end after it was interrupted."""
PATIENCE_S = 1.0
"""Seconds that work has to end by itself before it is interrupted: most is short, and what is interrupted between two
steps of Python can leave a file open."""
_POLL_S = 0.1


class Stopped(BaseException):
    """Raised in work that is no longer wanted. Not an Exception, so that no library swallows it."""


class Moment(Generic[V]):
    """A point in a start at which something, of type V, becomes known."""

    def __init__(self, name: str) -> None:
        self.name = name


class Task(Generic[T]):
    """Work in a thread of its own, and what became of it."""

    def __init__(self, name: str, work: Callable[[threading.Event], T], clock: Clock) -> None:
        self.name = name
        self.stopping = threading.Event()
        """Set when the work is no longer wanted; for work that looks."""
        self._clock = clock
        self._value: Any = None
        self._error: BaseException | None = None
        self._start_s, self._end_s = clock.now(), 0.0
        self._done, self._door = threading.Event(), threading.Lock()
        self._entered = self._told = self._over = False
        # A daemon, so that work which does not end when it is told to does not keep the process.
        self._thread = threading.Thread(target=self._run, args=(work,), name=f"beside: {name}", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def span(self) -> Span:
        """From its begin to its end, or until now."""
        end = self._end_s if self.done else self._clock.now()
        return Span(name=self.name, start_s=self._start_s, wall_s=end - self._start_s)

    def result(self) -> T:
        """Wait for the work; what it returned. Raises what it raised."""
        # In steps, so that a signal or a stage's time limit ends the wait.
        while not self._done.wait(_POLL_S):
            pass
        if self._error is not None:
            raise self._error
        value: T = self._value
        return value

    def take(self) -> T:
        """`result`, of which nothing stays here."""
        value = self.result()
        self._value = None
        return value

    def stop(self) -> None:
        """Interrupt the work wherever it stands; does not wait. May be called at any time and again."""
        with self._door:
            self.stopping.set()
            if self._entered and not self._over and not self._told:
                self._told = True
                raise_in(self._thread.ident or 0, Stopped)

    def join(self, seconds: float) -> bool:
        """Whether the work ended within `seconds`."""
        return self._done.wait(seconds)

    def _run(self, work: Callable[[threading.Event], T]) -> None:
        try:
            try:
                self._enter()
                self._value = work(self.stopping)
            except BaseException as error:
                self._error = error
            self._shut()
        # It was on its way while the work ended, and comes once.
        except Stopped as late:
            self._over = True
            if self._value is None:
                self._error = self._error or late
        self._end_s = self._clock.now()
        self._done.set()

    def _enter(self) -> None:
        """From here on something may be raised in this thread: not before it is where that is caught."""
        with self._door:
            if self.stopping.is_set():
                raise Stopped
            self._entered = True

    def _shut(self) -> None:
        """From here on nothing is raised in this thread."""
        with self._door:
            self._over = True
            if self._told:
                take_back()


class Beside:
    """All work beside one start.

    Args:
        without: names of work that is not to be begun: what it gains is measured so.
    """

    def __init__(self, clock: Clock, without: Collection[str] = ()) -> None:
        self._clock, self._without = clock, frozenset(without)
        self._tasks: list[Task[Any]] = []
        self._waiting: list[tuple[Moment[Any], str, Callable[[Any], Any], Coming[Any]]] = []
        self._closed = False

    def begin(self, name: str, work: Callable[[threading.Event], T]) -> Task[T] | None:
        """Begin it now; None where nothing is to run beside.

        Args:
            work: given an event that is set once it is no longer wanted. Work that does not look is interrupted.
        """
        if self._closed or name in self._without:
            return None
        task = Task(name, work, self._clock)
        self._tasks.append(task)
        return task

    def after(self, moment: Moment[V], name: str, work: Callable[[V], T]) -> Coming[T]:
        """Begin it at a moment, with what becomes known then."""
        coming: Coming[T] = Coming()
        self._waiting.append((moment, name, work, coming))
        return coming

    def reached(self, moment: Moment[V], value: V) -> None:
        """Begin what waits for this moment."""
        for due in [each for each in self._waiting if each[0] is moment]:
            self._waiting.remove(due)
            _, name, work, coming = due
            coming.task = self.begin(name, _given(work, value))

    def close(self, grace_s: float = GRACE_S) -> list[str]:
        """End everything; the names of what did not end in time. May be called again."""
        self._closed = True
        self._waiting.clear()
        for task in self._tasks:
            task.stopping.set()
        for task in _unfinished(self._tasks, PATIENCE_S):
            task.stop()
        return [task.name for task in _unfinished(self._tasks, grace_s)]

    def spans(self) -> list[Span]:
        """What ran, in the order in which it began."""
        return [task.span for task in self._tasks]


class Coming(Generic[T]):
    """Work that a moment begins; `task` is None until then, and for good if the moment never comes."""

    task: Task[T] | None = None


def begin_or_do(beside: Beside | None, name: str, work: Callable[[], T]) -> Callable[[], T]:
    """Begin work beside or, where that is not wanted, do it now; what waits for its value."""
    task = beside.begin(name, lambda _: work()) if beside is not None else None
    if task is not None:
        return task.result
    value = work()
    return lambda: value


def _unfinished(tasks: Iterable[Task[Any]], seconds: float) -> list[Task[Any]]:
    """Those that have not ended within `seconds` in all."""
    end = time.monotonic() + seconds
    return [task for task in tasks if not task.join(max(0.0, end - time.monotonic()))]


def _given(work: Callable[[V], T], value: V) -> Callable[[threading.Event], T]:
    return lambda _: work(value)
