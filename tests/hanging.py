"""Stages that do not end by themselves, named on a command line as `tests.hanging:Name`."""

from __future__ import annotations

import ctypes
import signal
import time
from pathlib import Path

from orchestrator import Context, Stage, StageConfig, watchdog

STARTED = Path("started")


class InPython(Stage[StageConfig]):
    def run(self, ctx: Context) -> None:
        STARTED.touch()
        with ctx.span("waiting"):
            time.sleep(600)


class InC(Stage[StageConfig]):
    """In a call that no signal interrupts."""

    def run(self, ctx: Context) -> None:
        watchdog.GRACE_S = 0.3
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, signal.NSIG))
        STARTED.touch()
        with ctx.span("kernel"):
            ctypes.CDLL(None).sleep(600)


class InCWithTheInterpreter(Stage[StageConfig]):
    """In a call that keeps every other thread from running."""

    def __init__(self, config: StageConfig) -> None:
        super().__init__(config)
        watchdog.GRACE_S = 0.3

    def run(self, ctx: Context) -> None:
        ctypes.PyDLL(None).sleep(600)


class Unwinding(Stage[StageConfig]):
    """Hangs in what it left to do at the end."""

    def run(self, ctx: Context) -> None:
        ctx.cleanup.callback(_hang)
        STARTED.touch()
        time.sleep(600)


class UnwindingInC(Stage[StageConfig]):
    """The same, in a call that no signal interrupts."""

    def run(self, ctx: Context) -> None:
        ctx.cleanup.callback(_hang_in_c)
        STARTED.touch()
        time.sleep(600)


def _hang() -> None:
    Path("unwinding").touch()
    time.sleep(600)


def _hang_in_c() -> None:
    Path("unwinding").touch()
    libc = ctypes.CDLL(None)
    while True:
        libc.sleep(600)
