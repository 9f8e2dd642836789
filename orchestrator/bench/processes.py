"""Processes that are timed, and that end with everything they started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from orchestrator.errors import StageError
from orchestrator.signals import held_back, let_through

_GRACE_S = 10.0
_TAIL_LINES = 20


class FailedProcess(StageError):
    """A measured process that failed; what it said last is in the message."""


@dataclass(frozen=True)
class Place:
    """Where processes run: their environment, folder and time limit in seconds."""

    environment: Mapping[str, str]
    folder: Path
    timeout_s: float


def timed(command: Sequence[str], place: Place, log: Path) -> float:
    """Seconds from spawning to exit; `log` gets the output.

    Raises:
        FailedProcess: it did not succeed, or not in time.
    """
    begin = time.monotonic()
    with log.open("wb") as output, spawned(command, place, output.fileno()) as process:
        try:
            code = process.wait(place.timeout_s)
        except subprocess.TimeoutExpired:
            raise FailedProcess(f"{shown(command)} did not end in {place.timeout_s:g} s:\n{tail(log)}") from None
        seconds = time.monotonic() - begin
    if code != 0:
        raise FailedProcess(f"{shown(command)} ended with {code}:\n{tail(log)}")
    return seconds


@contextmanager
def spawned(command: Sequence[str], place: Place, output: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, which ends, with its children, at the end of the block."""
    # A signal that came while it is spawned would leave a process that nobody knows.
    with held_back():
        process = subprocess.Popen(
            command,
            env=dict(place.environment),
            cwd=place.folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            with let_through():
                yield process
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Its children too, in its session or out of it: a device's memory is free once the last of them is gone."""
    family = _family(process.pid)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(number)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        _, family = psutil.wait_procs(family, timeout=_GRACE_S)
        if not family:
            break
    process.wait()


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return []


def shown(command: Sequence[str]) -> str:
    """A command for a message."""
    return " ".join(command)


def tail(log: Path) -> str:
    """The last lines of what a process said."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
