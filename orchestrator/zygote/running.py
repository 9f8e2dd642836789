"""The starts under way: their clients' signals, their ends, and what they learned."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from orchestrator.zygote.wire import receive, send

GRACE_S = 10.0
"""Seconds that a start has to end by itself once its client is gone."""


@dataclass
class _Start:
    """`learned` is the descriptor of the file with the names of the modules that it imported itself, `ends_by` when it
    is killed, once it was told to end."""

    pid: int
    connection: socket.socket
    arguments: list[str]
    learned: int
    since: float = field(default_factory=time.monotonic)
    ends_by: float | None = None


class Running:
    """
    Args:
        selector: gets the connections of the clients, with the process id of the start each belongs to.
        say: for the server's log.
    """

    def __init__(self, selector: selectors.BaseSelector, say: Callable[[str], None]) -> None:
        self._selector, self._say = selector, say
        self._starts: dict[int, _Start] = {}
        self.count, self.last = 0, time.monotonic()
        """Starts so far, and when the last one began or ended."""

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, pid: int, connection: socket.socket, arguments: list[str], learned: int) -> None:
        """A start that has just been forked; its client is told."""
        self.count, self.last = self.count + 1, time.monotonic()
        self._starts[pid] = _Start(pid, connection, arguments, learned)
        self._selector.register(connection, selectors.EVENT_READ, pid)
        _tell(connection, {"started": pid})
        self._say(f"start {pid}: {' '.join(arguments)}")

    def hear(self, pid: int) -> None:
        """A client has sent a signal; or it is gone, and its start ends."""
        start = self._starts.get(pid)
        if start is None:
            return
        try:
            received = receive(start.connection)
        except OSError:
            received = None
        if received is not None:
            os.kill(pid, int(received[0].get("signal", 0)))
            return
        self._selector.unregister(start.connection)
        self._say(f"start {pid}: its client is gone")
        start.ends_by = time.monotonic() + GRACE_S
        os.kill(pid, signal.SIGTERM)

    def kill_overdue(self) -> None:
        for start in self._starts.values():
            if start.ends_by is not None and time.monotonic() > start.ends_by:
                # With what it has started: its group is its own.
                with suppress(ProcessLookupError):
                    os.killpg(start.pid, signal.SIGKILL)

    def reap(self) -> list[str]:
        """Tell the clients of starts that have ended; the names of the modules that those had to import."""
        names: list[str] = []
        for start in list(self._starts.values()):
            pid, status = os.waitpid(start.pid, os.WNOHANG)
            if pid:
                self._conclude(start, os.waitstatus_to_exitcode(status))
                names += _read_names(start.learned)
                os.close(start.learned)
        return names

    def listed(self) -> list[dict[str, Any]]:
        now = time.monotonic()
        return [{"pid": each.pid, "s": now - each.since, "arguments": each.arguments} for each in self._starts.values()]

    def leave(self) -> None:
        """In a forked process: let go of the other starts."""
        for start in self._starts.values():
            start.connection.close()
            os.close(start.learned)
        self._starts.clear()

    def _conclude(self, start: _Start, code: int) -> None:
        del self._starts[start.pid]
        self.last = time.monotonic()
        if start.ends_by is None:
            self._selector.unregister(start.connection)
        _tell(start.connection, {"exit": code} if code >= 0 else {"killed": -code})
        start.connection.close()
        self._say(f"start {start.pid}: exit {code} after {self.last - start.since:.1f} s")


def _tell(connection: socket.socket, message: dict[str, Any]) -> None:
    # A client that is gone is noticed when it is heard.
    with suppress(OSError):
        send(connection, message)


def _read_names(descriptor: int) -> list[str]:
    size = os.fstat(descriptor).st_size
    try:
        names = json.loads(os.pread(descriptor, size, 0)) if size else []
    except ValueError:
        return []
    return [name for name in names if isinstance(name, str)]
