"""Bytes from a hub into files that grow: what an interruption left is gone on with, nothing is believed unhashed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from threading import Event

from orchestrator.events import Progress
from orchestrator.hub.listing import Listing, RemoteFile, UnreachableError
from orchestrator.hub.store import Store
from orchestrator.hub.wire import stream

_FILES_AT_ONCE = 8
_TRIES = 5
"""In a row without a byte."""
_HASHED_BYTES = 16 << 20


class _StoppedError(Exception):
    """Another file failed, or the start was interrupted."""


def download(listing: Listing, missing: Sequence[RemoteFile], store: Store, progress: Progress) -> None:
    """Bring files into the store, several at a time.

    Args:
        progress: advanced from several threads, in bytes, those that an earlier try left included.

    Raises:
        RefusedError, UnreachableError: the hub; names the file where one broke off.
        OSError: the folder cannot be written, or is full.
    """
    (store.folder / "blobs").mkdir(parents=True, exist_ok=True)
    work = _Work(listing, store, progress)
    pool = ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="download")
    try:
        # The largest first, so that none of them is left alone at the end.
        futures = [pool.submit(work.fetch, file) for file in sorted(missing, key=lambda file: -file.size)]
        wait(futures, return_when=FIRST_EXCEPTION)
    finally:
        work.stopping.set()
        pool.shutdown(wait=True, cancel_futures=True)
    errors = [future.exception() for future in futures if not future.cancelled()]
    for error in errors:
        if error is not None and not isinstance(error, _StoppedError):
            raise error


class _Work:
    """The files of one listing, each fetched in a thread of its own."""

    def __init__(self, listing: Listing, store: Store, progress: Progress) -> None:
        self._listing, self._store, self._progress = listing, store, progress
        self._reported: dict[str, int] = {}
        self.stopping = Event()

    def fetch(self, file: RemoteFile) -> None:
        part = self._store.part(file)
        part.touch()
        failures = 0
        while (have := self._report(file, part)) != file.size:
            try:
                self._go_on(file, part, have)
            except UnreachableError as error:
                failures = 1 if self._report(file, part) > have else failures + 1
                if failures == _TRIES:
                    raise UnreachableError(f"{error} at byte {self._report(file, part):,} of {file.name}") from error
                self.stopping.wait(0.25 * 2**failures)
            if self.stopping.is_set():
                raise _StoppedError
        if _digest(part, file) != file.digest:
            part.unlink()
            raise UnreachableError(f"what came for {file.name} is not what it announced; start again")
        part.replace(self._store.blob(file))

    def _go_on(self, file: RemoteFile, part: Path, have: int) -> None:
        """Ask for what is missing of a file, and write it where it belongs; return early if told to stop."""
        offset = have if have < file.size else 0
        with part.open("r+b", buffering=0) as target, closing(stream(self._listing, file, offset)) as pieces:
            for at, piece in pieces:
                if at != target.tell():
                    target.seek(at)
                    target.truncate()
                target.write(piece)
                self._report(file, part, at + len(piece))
                if self.stopping.is_set():
                    return
        if part.stat().st_size < file.size:
            raise UnreachableError("it ended a transfer early")

    def _report(self, file: RemoteFile, part: Path, size: int | None = None) -> int:
        """Advance the progress to where a file is, and return that."""
        size = part.stat().st_size if size is None else size
        # Each file is one thread's.
        self._progress.advance(size - self._reported.get(file.name, 0))
        self._reported[file.name] = size
        return size


def _digest(path: Path, file: RemoteFile) -> str:
    """Large files are named by the SHA-256 of their content, small ones by git's hash of a blob."""
    large = len(file.digest) == hashlib.sha256().digest_size * 2
    digest = hashlib.sha256() if large else hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    with path.open("rb") as content:
        while chunk := content.read(_HASHED_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
