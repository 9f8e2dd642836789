"""One start of a sweep in a process of its own: its signals, its last words, and how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from orchestrator.compose.home import Home
from orchestrator.errors import Interrupted, StageError
from orchestrator.signals import before_interruption, held_back, interruptible, let_through, owns_process, second_signal

MODULE = "orchestrator.dependent"
_LAST_LINES = 40
_DRAIN_S = 5.0
_GRACE_S = 60.0


class ProcessDied(StageError):
    """The process of a start ended without a record."""


@dataclass(frozen=True)
class Ended:
    """How a start's process ended.

    Attributes:
        code: its exit code; negative for the signal that ended it.
        last_words: the end of what it wrote to stderr.
    """

    code: int
    last_words: str

    @property
    def errors(self) -> list[str]:
        """What it said was wrong with what was asked for."""
        return [line.removeprefix("error: ") for line in self.last_words.splitlines() if line.startswith("error: ")]

    @property
    def how(self) -> str:
        if self.code >= 0:
            return f"ended with exit code {self.code}"
        name = signal.Signals(-self.code).name
        memory = ", perhaps by the system for lack of memory" if name == "SIGKILL" else ""
        return f"was ended by {name}{memory}"


def start(arguments: Sequence[str], *, by_server: bool, home: Home, output: Path | None = None) -> Ended:
    """`python -m orchestrator ARGUMENTS` in another process, until it has ended.

    A signal that comes here is sent to it, and raised here once it has left its record; a second one is sent at once.

    Args:
        output: the file that gets what it writes; None for this process's own streams.
        by_server: have the import server fork it.
        home: the process with which it ends, besides this one.

    Raises:
        Interrupted: this process got SIGINT or SIGTERM.
    """
    how = "server" if by_server else "here"
    askers = ",".join(str(pid) for pid in dict.fromkeys([os.getpid(), home.pid_here]) if pid is not None)
    command = [sys.executable, "-X", "faulthandler", "-m", MODULE, askers, how, *arguments]
    with (
        nullcontext() if owns_process() else interruptible(),
        nullcontext(sys.stderr) if output is None else output.open("a") as sink,
        # A signal that came while it is spawned would be told to nobody.
        held_back(),
    ):
        # A session of its own: Ctrl-C reaches it from here alone, and so once.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=None if output is None else sink,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        again = second_signal(lambda interrupt: _send(process, interrupt.signum))
        with again, _passed_on(process.stderr, sink) as lines:
            _wait(process)
    return Ended(process.returncode, "".join(lines))


def _wait(process: subprocess.Popen[str]) -> None:
    try:
        with let_through():
            process.wait()
    except (Interrupted, KeyboardInterrupt) as error:
        _send(process, error.signum if isinstance(error, Interrupted) else signal.SIGINT)
        process.wait()
        raise


def _send(process: subprocess.Popen[str], signum: int) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(signum)


@contextmanager
def _passed_on(stream: IO[str] | None, sink: IO[str]) -> Iterator[deque[str]]:
    """The last lines of the stream, each of which is written to the sink as it comes."""
    lines: deque[str] = deque(maxlen=_LAST_LINES)
    if stream is None:
        yield lines
        return
    reader = threading.Thread(target=_pass_on, args=(stream, sink, lines), name="stderr of a start", daemon=True)
    reader.start()
    try:
        yield lines
    finally:
        # Something that the start left behind may hold the other end open.
        reader.join(_DRAIN_S)


def _pass_on(stream: IO[str], sink: IO[str], lines: deque[str]) -> None:
    # The sink may be closed while somebody holds the other end open.
    with stream, suppress(ValueError):
        for line in stream:
            lines.append(line)
            sink.write(line)
            sink.flush()


@contextmanager
def told_to_workers() -> Iterator[None]:
    """A signal is also sent to the launcher's worker processes that have a start under way, and comes here once those
    starts have left their records."""
    with before_interruption(_tell_workers):
        yield


def _tell_workers(signum: int) -> None:
    workers, starts = [], []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if MODULE in each.cmdline() and each.ppid() != os.getpid():
                starts.append(each)
                workers.append(psutil.Process(each.ppid()))
    for worker in workers:
        with suppress(psutil.Error):
            worker.send_signal(signum)
    psutil.wait_procs(starts, timeout=_GRACE_S)
