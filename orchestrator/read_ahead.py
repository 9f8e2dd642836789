"""Files brought into the page cache before anybody asks for them, by calls that leave the interpreter alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import psutil

_CHUNK_BYTES = 64 << 20
"""Of one call: each waits for the interpreter at its end, which whoever computes in Python gives up every 5 ms."""
_MOST_THREADS = 4


@dataclass(frozen=True)
class _Chunk:
    file: Path
    start: int
    size: int


@dataclass(frozen=True)
class ReadAhead:
    """What was read, and what lay in the page cache before, in bytes."""

    read_bytes: int
    cached_bytes: int


def read_ahead(files: Sequence[Path], stopping: Event, most_bytes: int | None = None) -> ReadAhead:
    """Read `files` in their order, so far as the page cache lacks them; returns early once `stopping` is set. Reading
    ahead is a help and no duty: a file that cannot be read is left to whoever needs it.

    Args:
        most_bytes: how far; None for half of the memory that is available: more would push out what was read first.
    """
    chunks = list(_chunks(files, psutil.virtual_memory().available // 2 if most_bytes is None else most_bytes))
    count = max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // 2))
    with ThreadPoolExecutor(count, thread_name_prefix="read ahead") as pool:
        done = list(pool.map(lambda chunk: _read(chunk, stopping), chunks))
    return ReadAhead(sum(read for read, _ in done), sum(cached for _, cached in done))


def is_cached(file: int, offset: int) -> bool:
    """Whether the page at `offset` of an open file lies in the page cache; false where the kernel does not tell."""
    # To ask begins to read what is not there, and without this also what comes after it.
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
    try:
        return os.preadv(file, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except OSError:
        return False


def _chunks(files: Sequence[Path], most_bytes: int) -> Iterator[_Chunk]:
    left = most_bytes
    for file in files:
        try:
            size = min(file.stat().st_size, left)
        except OSError:
            continue
        left -= size
        yield from (_Chunk(file, at, min(_CHUNK_BYTES, size - at)) for at in range(0, size, _CHUNK_BYTES))


def _read(chunk: _Chunk, stopping: Event) -> tuple[int, int]:
    """Bytes read, and bytes found in the page cache."""
    if stopping.is_set():
        return 0, 0
    try:
        file = os.open(chunk.file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if all(is_cached(file, chunk.start + at) for at in (0, chunk.size // 2, chunk.size - 1)):
                return 0, chunk.size
            return _pull(file, chunk), 0
        finally:
            os.close(file)
    except OSError:
        return 0, 0


def _pull(file: int, chunk: _Chunk) -> int:
    """From the file to nowhere: the kernel fills its pages and copies nothing."""
    os.posix_fadvise(file, chunk.start, chunk.size, os.POSIX_FADV_SEQUENTIAL)
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        done = 0
        while done < chunk.size:
            count = os.sendfile(nowhere, file, chunk.start + done, chunk.size - done)
            if count == 0:
                break
            done += count
        return done
    finally:
        os.close(nowhere)
