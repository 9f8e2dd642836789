"""Messages between the import server and its clients: JSON over a local socket, open files beside it."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")
_MOST_FILES = 3


def send(connection: socket.socket, message: dict[str, Any], files: Sequence[int] = ()) -> None:
    """
    Args:
        files: descriptors; the receiver gets its own of the same files.

    Raises:
        OSError: nobody listens any more.
    """
    data = json.dumps(message).encode()
    socket.send_fds(connection, [_LENGTH.pack(len(data))], files)
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and the files that came with it; None where the other side has closed, also within one.

    Raises:
        OSError: the connection failed, or nothing came within its timeout.
    """
    head, files, _, _ = socket.recv_fds(connection, _LENGTH.size, _MOST_FILES, socket.MSG_CMSG_CLOEXEC)
    head += _exactly(connection, _LENGTH.size - len(head)) if head else b""
    body = _exactly(connection, _LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else b""
    try:
        return json.loads(body), files
    except ValueError:
        for each in files:
            os.close(each)
        return None


def accept(listener: socket.socket, owner: int, timeout_s: float) -> socket.socket | None:
    """The next connection; None, after a word to the other side, if that is not a process of the owner."""
    connection, _ = listener.accept()
    connection.settimeout(timeout_s)
    if peer_uid(connection) == owner:
        return connection
    with connection, suppress(OSError):
        send(connection, {"refused": "the import server is another user's"})
    return None


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to the user of this one, as the kernel says."""
    return peer_uid(connection) == os.getuid()


def peer_uid(connection: socket.socket) -> int:
    """The user of the process at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts: list[bytes] = []
    while size > 0 and (part := connection.recv(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
