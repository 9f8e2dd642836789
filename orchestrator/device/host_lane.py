"""The lane of a device whose memory is the host's: a copy is made at once."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from orchestrator.device.base import HostBuffer, Lane


@contextmanager
def host_lane(size: int) -> Iterator[Lane]:
    """A lane of one buffer."""
    yield _HostLane(size)


class _HostLane:
    def __init__(self, size: int) -> None:
        self._buffer = page_buffers(size, 1)[0]

    def buffer(self) -> HostBuffer:
        return self._buffer

    def copy(self, target: Any, source: Any, stored: Any) -> None:
        if source.storage_offset() % stored.itemsize:
            source = source.clone()
        target.copy_(source.view(stored))


def page_buffers(size: int, count: int) -> list[HostBuffer]:
    """Buffers side by side in one anonymous mapping, each from a page on; given back when the last one is let go."""
    import torch

    step = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    mapping = mmap.mmap(-1, step * count)
    # Advice: a kernel without large pages refuses it.
    with suppress(AttributeError, OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    view = memoryview(mapping)
    return [
        HostBuffer(whole[start : start + step], view[start : start + step]) for start in range(0, step * count, step)
    ]
