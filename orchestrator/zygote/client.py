"""The side of the import server that a person sees: it asks for a start and stands in for it until it ends."""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from orchestrator.clock import Clock
from orchestrator.commands import current_folder
from orchestrator.errors import UserError
from orchestrator.zygote.place import Place
from orchestrator.zygote.wire import is_same_user, receive, send

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_MOST_RESTARTS = 3


def run(place: Place, arguments: Sequence[str]) -> int:
    """A start by the server: its output, its signals, its exit code.

    Raises:
        UserError: there is no server.
    """
    for _ in range(_MOST_RESTARTS):
        with connected(place) as connection, _signals() as came:
            send(connection, _request(arguments), _standard_files())
            answer = _stand_in(connection, came)
        if "restarting" not in answer:
            return _conclusion(answer, place)
        sys.stderr.write(f"import server: {answer['restarting']}; it restarts\n")
    sys.stderr.write("error: the import server restarts again and again\n")
    return 1


def ask(place: Place, question: str) -> dict[str, Any] | None:
    """What the server answers to `status` or `stop`; None without a server. Waits while it imports."""
    try:
        with connected(place) as connection:
            send(connection, {"do": question})
            received = receive(connection)
    except (UserError, OSError):
        return None
    return received[0] if received is not None else None


@contextmanager
def connected(place: Place) -> Iterator[socket.socket]:
    """
    Raises:
        UserError: there is no server, or it is not this user's.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(place.socket))
        except (FileNotFoundError, ConnectionRefusedError):
            raise UserError(
                "no import server runs for this Python and environment; python -m orchestrator.zygote start"
            ) from None
        if not is_same_user(connection):
            raise UserError(f"{place.socket} is another user's; it is not used")
        yield connection


def _request(arguments: Sequence[str]) -> dict[str, Any]:
    """All that a start takes over from the process that asks for it."""
    umask = os.umask(0o077)
    os.umask(umask)
    streams = [(stream.encoding, stream.errors) if stream else None for stream in (sys.stdin, sys.stdout, sys.stderr)]
    return {
        "do": "start",
        "arguments": list(arguments),
        "environment": dict(os.environ),
        "folder": current_folder(),
        "path": sys.path,
        "umask": umask,
        "streams": streams,
        "cores": sorted(os.sched_getaffinity(0)),
        "limits": [[kind, *resource.getrlimit(kind)] for kind in _limits()],
        "zero": time.monotonic() - Clock.since_process_start().now(),
    }


def _limits() -> set[int]:
    return {value for name, value in vars(resource).items() if name.startswith("RLIMIT_")}


def _standard_files() -> list[int]:
    """Descriptors 0 to 2, or nothing in the place of one that is closed."""
    found = []
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
            found.append(descriptor)
        except OSError:
            found.append(os.open(os.devnull, os.O_RDWR))
    return found


@contextmanager
def _signals() -> Iterator[int]:
    """Where the numbers of the signals to be forwarded can be read from, a byte each."""
    receives, sends = os.pipe()
    os.set_blocking(sends, False)
    previous = {each: signal.signal(each, lambda *_: None) for each in _FORWARDED}
    wakeup = signal.set_wakeup_fd(sends)
    try:
        yield receives
    finally:
        signal.set_wakeup_fd(wakeup)
        for each, before in previous.items():
            signal.signal(each, before)
        os.close(sends)
        os.close(receives)


def _stand_in(connection: socket.socket, came: int) -> dict[str, Any]:
    """Forward signals until the server says how the start ended; nothing if it ends without a word."""
    is_under_way = False
    while True:
        ready, _, _ = select.select([connection.fileno(), came], [], [])
        if came in ready:
            for number in os.read(came, 64):
                if not is_under_way:
                    return {"exit": 128 + number}
                send(connection, {"signal": number})
        if connection.fileno() in ready:
            try:
                received = receive(connection)
            except OSError:
                received = None
            if received is None:
                return {}
            if "started" not in received[0]:
                return received[0]
            is_under_way = True


def _conclusion(answer: dict[str, Any], place: Place) -> int:
    """The exit code, with a word where the start cannot have said one itself."""
    if "exit" in answer:
        return int(answer["exit"])
    if "killed" in answer:
        number = int(answer["killed"])
        sys.stderr.write(f"error: the start was ended by {signal.Signals(number).name}\n")
        return 128 + number
    reason = answer.get("refused", f"the import server has ended; its last words may be in {place.log}")
    sys.stderr.write(f"error: {reason}\n")
    return 1
