"""Ranges of files into memory, through the page cache or past it."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from orchestrator.engine.weights.jobs import PAGE

_NO_DIRECT = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})


class CutOffError(Exception):
    """A file ends before a range does; carries where."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        super().__init__(f"ends at byte {offset}")


class RangeReader:
    """One thread's view of the files: descriptors of its own, so that the kernel's readahead follows this thread.

    Args:
        direct: read past the page cache what it does not hold, where the file system allows that.

    Attributes:
        direct_bytes: read past the page cache.
    """

    def __init__(self, *, direct: bool) -> None:
        self._direct = direct
        self._path: Path | None = None
        self._buffered_fd = self._direct_fd = -1
        self.direct_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def read(self, file: Path, start: int, stop: int, memory: memoryview) -> int:
        """Read a range; it begins in `memory` at the returned place, which is `start` within its page.

        Args:
            memory: from a page on, and a page longer at each end than the range may be.

        Raises:
            CutOffError: the file is shorter.
            OSError: it cannot be read.
        """
        self._open(file)
        lead = start % PAGE
        done = self._read_direct(start - lead, stop, memory) if self._direct_fd >= 0 else 0
        have = max(start, start - lead + done)
        if have < stop:
            self._scatter([memory[have - start + lead : stop - start + lead]], have)
        return lead

    def scatter(self, file: Path, start: int, views: Sequence[memoryview]) -> None:
        """Read what lies side by side from `start` on into several places, through the page cache.

        Raises:
            CutOffError, OSError: as `read`.
        """
        self._open(file)
        self._scatter(list(views), start)

    def _scatter(self, views: list[memoryview], offset: int) -> None:
        while views:
            count = os.preadv(self._buffered_fd, views, offset)
            if count == 0:
                raise CutOffError(offset)
            offset += count
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if views and count:
                views[0] = views[0][count:]

    def _read_direct(self, start: int, stop: int, memory: memoryview) -> int:
        """Bytes read past the page cache from `start`, a page; 0 if the cache has them or the file system refuses."""
        if _is_cached(self._buffered_fd, start):
            return 0
        try:
            count = os.preadv(self._direct_fd, [memory[: -(-(stop - start) // PAGE) * PAGE]], start)
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
            os.close(self._direct_fd)
            self._direct, self._direct_fd = False, -1
            return 0
        self.direct_bytes += count
        return min(count, stop - start)

    def _open(self, file: Path) -> None:
        if file == self._path:
            return
        self._close()
        self._buffered_fd, self._path = os.open(file, os.O_RDONLY | os.O_CLOEXEC), file
        if self._direct:
            self._direct_fd = _open_direct(file)

    def _close(self) -> None:
        for descriptor in (self._buffered_fd, self._direct_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self._path, self._buffered_fd, self._direct_fd = None, -1, -1


def _open_direct(file: Path) -> int:
    """A descriptor that reads past the page cache; -1 where there is no such thing."""
    try:
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0)) if hasattr(os, "O_DIRECT") else -1
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
        return -1


def _is_cached(descriptor: int, offset: int) -> bool:
    """Whether the page cache holds the page at `offset`; False where the file system does not tell."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) > 0
    except OSError:
        return False
