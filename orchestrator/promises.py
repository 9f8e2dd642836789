"""What starts on one device have been promised, and the gate before it: files that are locked while their holders live.

Two things lie in a device's folder. The gate is a lock that a start takes to read what is free and to write down what
it was promised, which takes milliseconds; where a process's bytes are only known from the device as a whole, it keeps
the gate until it has started. A promise is a locked file of its own: how much the start may come to hold and, once it
has started, how much it does hold, so that what it needs only under load is left for it. The kernel drops a lock with
its holder, however that ends; the file of a dead one is removed by whoever finds it.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

_POLL_S = 0.02
_LENGTH = 32 * 1024
"""Of a promise's file: the longest path that a run may have, each byte of it escaped, and numbers."""


@dataclass(frozen=True)
class Promise:
    """What a start may hold, in bytes; `held_bytes` is None until it has started."""

    pid: int
    run_dir: str
    requested_bytes: int
    held_bytes: int | None = None

    @property
    def outstanding_bytes(self) -> int:
        """What it may still take. All of it while it starts: what it has by now is not known here."""
        return max(0, self.requested_bytes - (self.held_bytes or 0))

    @property
    def holder(self) -> str:
        return f"process {self.pid} ({self.run_dir})"


@dataclass(frozen=True)
class Others:
    """Promises of live starts, and whether some start was found that ended without taking its promise back."""

    promises: tuple[Promise, ...]
    found_dead: bool = False

    @property
    def outstanding_bytes(self) -> int:
        return sum(promise.outstanding_bytes for promise in self.promises)

    @property
    def starting(self) -> tuple[Promise, ...]:
        return tuple(promise for promise in self.promises if promise.held_bytes is None)


class Kept:
    """A promise of this process. `close` takes it back."""

    def __init__(self, path: Path, promise: Promise) -> None:
        self._path, self._promise = path, promise
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._write(promise)

    def settled(self, held_bytes: int) -> None:
        """The start is over and holds this much at rest."""
        if self._file >= 0:
            promise = self._promise
            self._write(Promise(promise.pid, promise.run_dir, promise.requested_bytes, held_bytes))

    def close(self) -> None:
        """May be called again."""
        if self._file >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1

    def _write(self, promise: Promise) -> None:
        # One write of one length, so that a reader sees the old text or the new one.
        os.pwrite(self._file, json.dumps(asdict(promise)).encode().ljust(_LENGTH), 0)


class Desk:
    """The folder of one device.

    Args:
        folder: made if it is not there.

    Raises:
        OSError: the folder cannot be made, or is somebody else's.
    """

    def __init__(self, folder: Path) -> None:
        for each in (folder.parent, folder):
            each.mkdir(mode=0o700, exist_ok=True)
            if each.is_symlink() or each.stat().st_uid != os.getuid():
                raise PermissionError(f"{each} belongs to somebody else")
        self._folder = folder

    @contextmanager
    def alone(self, run_dir: str, say: Callable[[str], None]) -> Iterator[None]:
        """Hold the gate. Says for whom it waits, and for how long it did."""
        gate = os.open(self._folder / "gate", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _wait_for(gate, say)
            holder = f"process {os.getpid()} ({run_dir})"
            os.pwrite(gate, holder.encode().ljust(1024), 0)
            yield
        finally:
            os.close(gate)

    def others(self) -> Others:
        """The promises that live starts have. To be called with the gate held."""
        found = [_living(path) for path in sorted(self._folder.glob("*.json"))]
        return Others(tuple(each for each in found if each is not None), any(each is None for each in found))

    def promise(self, requested_bytes: int, run_dir: str) -> Kept:
        """Write down a promise of this process. To be called with the gate held."""
        name = f"{os.getpid()}-{secrets.token_hex(4)}.json"
        return Kept(self._folder / name, Promise(os.getpid(), run_dir, requested_bytes))


def desk_of(uuid: str) -> Desk:
    """The desk of a device on this machine, for this user's starts.

    Raises:
        OSError: the temporary folder does not take it.
    """
    return Desk(Path(tempfile.gettempdir()) / f"orchestrator-{os.getuid()}" / uuid.replace("/", "_"))


def _wait_for(gate: int, say: Callable[[str], None]) -> None:
    start, holder = time.monotonic(), ""
    while not _locked(gate, fcntl.LOCK_EX):
        if not holder:
            holder = os.pread(gate, 1024, 0).decode(errors="replace").strip() or "another start"
            say(f"waiting for {holder}, which measures this device")
        time.sleep(_POLL_S)
    if holder:
        say(f"waited {time.monotonic() - start:.1f} s for {holder}")


def _locked(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _living(path: Path) -> Promise | None:
    """The promise in a file that somebody has locked; a file that nobody has is removed."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if _locked(file, fcntl.LOCK_SH):
            path.unlink(missing_ok=True)
            return None
        return Promise(**json.loads(os.pread(file, _LENGTH, 0)))
    finally:
        os.close(file)
