"""The lane of a CUDA device: pinned buffers, a stream of its own, and an event for each buffer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from orchestrator.device.base import HostBuffer, Lane
from orchestrator.device.host_lane import page_buffers

_BUFFERS = 2
_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every context of the process."""


@contextmanager
def cuda_lane(index: int, size: int, scratch_bytes: int) -> Iterator[Lane]:
    """A lane of two buffers: one is filled while the other is copied. Its memory is unpinned at the end."""
    # Of the default stream's pool, so that the allocator can give it to anybody afterwards.
    scratch = torch.empty(scratch_bytes, dtype=torch.uint8, device=f"cuda:{index}")
    stream: Any = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream), _pinned(size) as buffers:
        try:
            yield _CudaLane(buffers, stream, scratch)
        finally:
            stream.synchronize()


@contextmanager
def _pinned(size: int) -> Iterator[list[HostBuffer]]:
    """Whole pages that are pinned where they are: exactly what is needed, and given back at once. The allocator for
    pinned memory would take the next power of two and keep it."""
    buffers = page_buffers(size, _BUFFERS)
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = buffers[0].tensor.data_ptr()
    code = int(runtime.cudaHostRegister(address, sum(buffer.tensor.numel() for buffer in buffers), _PORTABLE))
    if code != 0:
        tensors = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in buffers]
        yield [HostBuffer(tensor, memoryview(cast(Any, tensor.numpy()))) for tensor in tensors]
        return
    try:
        yield buffers
    finally:
        runtime.cudaHostUnregister(address)


class _CudaLane:
    def __init__(self, buffers: list[HostBuffer], stream: Any, scratch: torch.Tensor) -> None:
        self._buffers, self._stream, self._scratch = buffers, stream, scratch
        # Blocking: a thread that waits leaves its core to those that read.
        self._copied = [torch.cuda.Event(blocking=True) for _ in buffers]  # type: ignore[no-untyped-call]
        self._current = 0

    def buffer(self) -> HostBuffer:
        self._copied[self._current].record(self._stream)
        self._current = (self._current + 1) % len(self._buffers)
        self._copied[self._current].synchronize()
        return self._buffers[self._current]

    def copy(self, target: Any, source: Any, stored: Any) -> None:
        if stored == target.dtype:
            target.copy_(source, non_blocking=True)
            return
        # Bytes first: torch would convert on the host, and wait.
        raw = self._scratch[: source.numel()]
        raw.copy_(source, non_blocking=True)
        target.copy_(raw.view(stored))
