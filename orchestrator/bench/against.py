"""Another engine's start: a command, and the lines of its log that mark how far it is."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from orchestrator.bench.processes import FailedProcess, Place, spawned, tail

_POLL_S = 0.01


@dataclass(frozen=True)
class Other:
    """A shell command, and what to look for in its output: name -> regular expression."""

    command: str
    marks: Mapping[str, re.Pattern[str]]


def start_other(other: Other, place: Place, log: Path) -> dict[str, float]:
    """Run the command until each mark was seen; seconds from its start to the line of each. Then it is ended, with its
    children.

    A line's time is when it was read, at most 10 ms after it was written; what the command keeps in a buffer of its own
    is late.

    Raises:
        FailedProcess: it ended, or time was up, before the last mark.
    """
    begin, seen = time.monotonic(), dict[str, float]()
    command = ["/bin/sh", "-c", other.command]
    with log.open("wb") as output, closing(_Lines(log)) as reader, spawned(command, place, output.fileno()) as process:
        while missing := [name for name in other.marks if name not in seen]:
            ended = process.poll() is not None
            lines, now = reader.new(at_end=ended), time.monotonic() - begin
            found = [name for name in missing if any(other.marks[name].search(line) for line in lines)]
            seen |= dict.fromkeys(found, now)
            if not found and (ended or now > place.timeout_s):
                how = f"ended with {process.returncode}" if ended else f"was not ready in {place.timeout_s:g} s"
                wanted = " or ".join(f"--mark {name}={other.marks[name].pattern}" for name in missing)
                raise FailedProcess(f"{other.command} {how}, and no line matched {wanted}:\n{tail(log)}")
            if not found:
                time.sleep(_POLL_S)
    return seen


class _Lines:
    """Whole lines of a file that grows."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._rest = b""

    def new(self, *, at_end: bool) -> list[str]:
        """What came since the last call; `at_end` also a last line without its end."""
        data = self._rest
        while part := os.read(self._file, 1 << 16):
            data += part
        *lines, self._rest = data.split(b"\n")
        if at_end and self._rest:
            lines.append(self._rest)
        return [line.decode(errors="replace") for line in lines]

    def close(self) -> None:
        os.close(self._file)
