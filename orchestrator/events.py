"""What a run tells while it runs: to a person as lines, to a machine as JSON, or to nobody."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TextIO


class Progress(Protocol):
    """A long piece of work that says how far it is."""

    def advance(self, amount: int) -> None: ...


class Events(Protocol):
    """The listener of a run."""

    def info(self, message: str) -> None:
        """Something worth a line."""

    def warning(self, message: str) -> None:
        """Something that the user should act on."""

    def stage(self, slot: str, status: str, seconds: float, summary: str) -> None:
        """A stage has ended."""

    def progress(self, label: str, total: int, unit: str) -> Any:
        """A context manager that yields a `Progress`."""


class _NoProgress:
    def advance(self, amount: int) -> None:
        return None


class SilentEvents:
    """Says nothing; for programs that start an engine."""

    def info(self, message: str) -> None:
        return None

    def warning(self, message: str) -> None:
        return None

    def stage(self, slot: str, status: str, seconds: float, summary: str) -> None:
        return None

    @contextmanager
    def progress(self, label: str, total: int, unit: str) -> Iterator[Progress]:
        yield _NoProgress()


class TextEvents:
    """Lines for a person; a bar for what lasts over a second, where there is a terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout

    def info(self, message: str) -> None:
        self._print(message)

    def warning(self, message: str) -> None:
        self._print(f"warning: {message}")

    def stage(self, slot: str, status: str, seconds: float, summary: str) -> None:
        shown = "" if status == "ok" else f"{status}  "
        self._print(f"{slot:<14} {seconds:7.3f} s  {shown}{summary}".rstrip())

    @contextmanager
    def progress(self, label: str, total: int, unit: str) -> Iterator[Progress]:
        if not sys.stderr.isatty():
            yield _NoProgress()
            return
        from tqdm import tqdm

        with tqdm(total=total, desc=label, unit=unit, unit_scale=True, delay=1.0, leave=False) as bar:
            yield _Bar(bar)

    def _print(self, line: str) -> None:
        _say(line, self._stream)


class _Bar:
    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def advance(self, amount: int) -> None:
        self._bar.update(amount)


class JsonEvents:
    """One JSON object a line."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout

    def info(self, message: str) -> None:
        self._print(event="info", message=message)

    def warning(self, message: str) -> None:
        self._print(event="warning", message=message)

    def stage(self, slot: str, status: str, seconds: float, summary: str) -> None:
        self._print(event="stage", slot=slot, status=status, wall_s=round(seconds, 6), summary=summary)

    @contextmanager
    def progress(self, label: str, total: int, unit: str) -> Iterator[Progress]:
        self._print(event="progress", label=label, total=total, unit=unit)
        yield _NoProgress()

    def _print(self, **fields: Any) -> None:
        _say(json.dumps(fields), self._stream)


def _say(line: str, stream: TextIO) -> None:
    """A reader that has gone (`| head`) does not end the run: its record has everything."""
    try:
        print(line, file=stream, flush=True)
    except BrokenPipeError:
        leave_unread(stream)


def leave_unread(stream: TextIO) -> None:
    """What is written from now on is lost; without this the interpreter would complain at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def events_for(*, json_lines: bool) -> Events:
    """The listener for a person, or for a machine."""
    return JsonEvents() if json_lines else TextEvents()
