"""A CUDA device: the only file that knows torch.cuda."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, ClassVar

import torch

from orchestrator.device.base import DeviceInfo, Graph, Lane, Reserved
from orchestrator.device.cuda_lane import cuda_lane
from orchestrator.device.nvml import NvmlReader
from orchestrator.device.shared_cap import SharedCap
from orchestrator.errors import ConfigError
from orchestrator.memory.allocator import LARGE_PAGE
from orchestrator.memory.snapshot import Snapshot, Source
from orchestrator.memory.virtual import AddressRange, virtual_memory_refusal
from orchestrator.units import MiB


class CudaDevice:
    """One GPU, by its index among those that are visible.

    Before `open` only the driver's management library is asked, which makes no context and takes no memory.
    """

    supports_graphs = True
    memory_slack_bytes = 2 * MiB
    library_bytes = 128 * MiB
    page_bytes = LARGE_PAGE
    # One a device and process, as the allocator itself is.
    _caps: ClassVar[dict[int, SharedCap]] = {}

    def __init__(self, index: int = 0, total_bytes: int | None = None) -> None:
        """
        Raises:
            ConfigError: there is no such device.
        """
        count = torch.cuda.device_count()
        if index >= count:
            works = f"there are {count}; give 0 to {count - 1}" if count else "there is none; device=cpu works"
            raise ConfigError.of("gpu.index", f"no such CUDA device: {works}", index)
        self.torch_device = f"cuda:{index}"
        self._index = index
        self._properties = torch.cuda.get_device_properties(index)
        self._total = total_bytes or self._properties.total_memory
        self._nvml = NvmlReader(str(self._properties.uuid))
        self._opened = False
        self._free_at_start = 0
        self._reserved_before = 0
        self._stream: Any = None

    @property
    def dtypes(self) -> frozenset[str]:
        always = {"float32", "float16"}
        return frozenset(always | {"bfloat16"} if self._properties.major >= 8 else always)

    @property
    def source_reason(self) -> str:
        return self._nvml.reason

    @property
    def virtual_memory_refusal(self) -> str | None:
        return virtual_memory_refusal(self._index)

    def open(self) -> None:
        if self._opened:
            # Of the calling thread, which need not be the one that opened it.
            torch.cuda.set_device(self._index)
            return
        free = self._nvml.free_bytes()
        self._reserved_before = self._allocator()["reserved_bytes.all.current"]
        _use_expandable_segments()
        torch.cuda.set_device(self._index)
        torch.zeros(1, device=self.torch_device)
        torch.cuda.synchronize(self._index)
        torch.cuda.empty_cache()
        self._nvml.opened()
        self._opened = True
        self._free_at_start = self._free() if free is None else free

    def info(self) -> DeviceInfo:
        properties = self._properties
        return DeviceInfo(
            kind="cuda",
            name=properties.name,
            total_bytes=self._total,
            driver=self._nvml.driver(),
            capability=f"{properties.major}.{properties.minor}",
            uuid=str(properties.uuid),
        )

    def snapshot(self) -> Snapshot:
        stats = self._allocator()
        free, reserved = min(self._free(), self._total), stats["reserved_bytes.all.current"]
        ours = self._nvml.process_bytes()
        if ours is None:
            grown = max(0, self._free_at_start - free) if self._opened else 0
            ours = self._reserved_before + grown
        return Snapshot(
            total_bytes=self._total,
            free_bytes=free,
            # A neighbour that leaves makes a change small; what the allocator took is this process's for certain.
            ours_bytes=max(ours, reserved),
            allocated_bytes=stats["allocated_bytes.all.current"],
            reserved_bytes=reserved,
            peak_bytes=stats["allocated_bytes.all.peak"],
            peak_reserved_bytes=stats["reserved_bytes.all.peak"],
            source=self._source,
        )

    def process_bytes(self) -> int:
        ours = self._nvml.process_bytes()
        return self.snapshot().ours_bytes if ours is None else ours

    def _free(self) -> int:
        """Of the device, for anybody. Before the context only the driver's library can tell; without it, the total."""
        if self._opened:
            return int(torch.cuda.mem_get_info(self._index)[0])
        free = self._nvml.free_bytes()
        return self._total if free is None else free

    def _allocator(self) -> defaultdict[str, int]:
        """The allocator's counters; zeros before its first use in this process."""
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return defaultdict(int, torch.cuda.memory_stats(self._index) if used else {})

    @property
    def _source(self) -> Source:
        return "nvml_process" if self._nvml.per_process else "device_delta"

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._index)

    def empty_cache(self) -> None:
        torch.cuda.synchronize(self._index)
        torch.cuda.empty_cache()

    def pin(self, tensor: Any) -> Any:
        return tensor.pin_memory()

    def lane(self, size: int, scratch_bytes: int = 0) -> AbstractContextManager[Lane]:
        return cuda_lane(self._index, size, scratch_bytes)

    @contextmanager
    def aside(self) -> Iterator[None]:
        torch.cuda.set_device(self._index)
        stream: Any = torch.cuda.Stream(self._index)  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            stream.synchronize()
            # One was made for this stream and this thread's handle, and would stay as long as the process.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        if self._opened:
            torch.cuda.synchronize(self._index)

    def limit(self, allocator_bytes: int | None) -> None:
        write = partial(_write_cap, self._index, self._properties.total_memory)
        self._caps.setdefault(self._index, SharedCap(write)).set(self, allocator_bytes, self._reserved_before)

    def reserve(self, size: int) -> Reserved:
        return _MappedTensor(self._index, size)

    def graph_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], Any], pool: Any) -> Graph:
        # One stream for every warm-up and capture: each further one costs a cuBLAS workspace of its own.
        first = self._stream is None
        if first:
            self._stream = torch.cuda.Stream(self._index)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self._index))
        if first:
            self._warm_up(work)
            # The graph's memory is its own: what the allocator keeps for reuse is no use to it.
            torch.cuda.empty_cache()
        try:
            return _CudaGraph(work, pool, self._stream)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            if first:
                raise
            # Work like that of the first capture needs no warm-up of its own, but for a library that first loads, for
            # this size alone, what it may not load while capturing.
            self._warm_up(work)
            return _CudaGraph(work, pool, self._stream)

    def _warm_up(self, work: Callable[[], Any]) -> None:
        with torch.cuda.stream(self._stream):
            work()
        self._stream.synchronize()

    def close(self) -> None:
        self._stream = None
        if self._index in self._caps:
            self._caps[self._index].leave(self)
        if self._opened:
            torch.cuda.empty_cache()


def _write_cap(index: int, total_bytes: int, cap: int | None) -> None:
    share = 1.0 if cap is None else min(1.0, max(0.0, cap / total_bytes))
    torch.cuda.set_per_process_memory_fraction(share, index)


class _MappedTensor:
    """Reserved addresses as a tensor."""

    def __init__(self, index: int, size: int) -> None:
        self._index = index
        self._range = AddressRange(index, size)

    def rounded(self, size: int) -> int:
        return self._range.rounded(size)

    def grow(self, size: int) -> int:
        return self._range.grow(size)

    def tensor(self, dtype: str, shape: tuple[int, ...]) -> Any:
        element: torch.dtype = getattr(torch, dtype)
        # The interface has no name for bfloat16: integers of the same size are taken, and seen as what they are.
        carrier = f"<i{element.itemsize}"
        memory = _Memory({"shape": shape, "typestr": carrier, "data": (self._range.address, False), "version": 3})
        return torch.as_tensor(memory, device=f"cuda:{self._index}").view(element)

    def close(self) -> None:
        torch.cuda.synchronize(self._index)
        self._range.close()


class _Memory:
    """What torch takes for foreign memory of a device."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__cuda_array_interface__ = interface


def _use_expandable_segments() -> None:
    """Segments that grow: less is reserved beyond what is live than with segments of fixed sizes (an 8B's language
    model on 16,384 tokens: 8 % instead of 22 %). What the user set in the environment stays."""
    if not any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


class _CudaGraph:
    """Captured without what `torch.cuda.graph` does before each capture: it gives the allocator's cache back, which the
    next one takes again."""

    def __init__(self, work: Callable[[], Any], pool: Any, stream: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            # What other threads ask of the driver meanwhile shall not end the capture.
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self.outputs = work()
            except BaseException:
                with suppress(RuntimeError):
                    self._graph.capture_end()
                raise
            self._graph.capture_end()

    def replay(self) -> None:
        self._graph.replay()
