"""A CUDA device: the only file that knows torch.cuda and NVML."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from orchestrator.device.base import DeviceInfo, Graph, Reserved
from orchestrator.errors import ConfigError
from orchestrator.memory.snapshot import Snapshot, Source
from orchestrator.memory.virtual import AddressRange, virtual_memory_refusal
from orchestrator.units import MiB


class CudaDevice:
    """One GPU, by its index among those that are visible.

    Before `open` only the driver's management library is asked, which makes no context and takes no memory.
    """

    supports_graphs = True
    memory_slack_bytes = 2 * MiB

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
        self._nvml = _NvmlReader(str(self._properties.uuid))
        self._opened = False
        self._free_at_start = 0
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
            return
        self._free_at_start = self._nvml.free_bytes() or 0
        _use_expandable_segments()
        torch.cuda.set_device(self._index)
        torch.zeros(1, device=self.torch_device)
        torch.cuda.synchronize(self._index)
        torch.cuda.empty_cache()
        self._opened = True

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
        if not self._opened:
            free = self._nvml.free_bytes()
            held = self._nvml.process_bytes() or 0
            free = self._total if free is None else min(free, self._total)
            return Snapshot(self._total, free, held, 0, 0, 0, 0, self._source)
        free, _ = torch.cuda.mem_get_info(self._index)
        ours = self._nvml.process_bytes()
        stats = torch.cuda.memory_stats(self._index)
        return Snapshot(
            total_bytes=self._total,
            free_bytes=free,
            ours_bytes=max(0, self._free_at_start - free) if ours is None else ours,
            allocated_bytes=stats.get("allocated_bytes.all.current", 0),
            reserved_bytes=stats.get("reserved_bytes.all.current", 0),
            peak_bytes=stats.get("allocated_bytes.all.peak", 0),
            peak_reserved_bytes=stats.get("reserved_bytes.all.peak", 0),
            source=self._source,
        )

    @property
    def _source(self) -> Source:
        return "nvml_process" if self._nvml.per_process else "device_delta"

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._index)

    def empty_cache(self) -> None:
        torch.cuda.synchronize(self._index)
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        if self._opened:
            torch.cuda.synchronize(self._index)

    def limit(self, allocator_bytes: int) -> None:
        share = min(1.0, max(0.0, allocator_bytes / self._properties.total_memory))
        torch.cuda.set_per_process_memory_fraction(share, self._index)

    def reserve(self, size: int) -> Reserved:
        return _MappedTensor(self._index, size)

    def graph_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], Any], pool: Any) -> Graph:
        # One stream for every warm-up and capture: each further one costs a cuBLAS workspace of its own.
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._index)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self._index))
        with torch.cuda.stream(self._stream):
            work()
        self._stream.synchronize()
        return _CudaGraph(work, pool, self._stream)

    def close(self) -> None:
        self._stream = None
        if self._opened:
            torch.cuda.empty_cache()


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
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")


class _CudaGraph:
    def __init__(self, work: Callable[[], Any], pool: Any, stream: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, stream=stream):
            self.outputs = work()

    def replay(self) -> None:
        self._graph.replay()


class _NvmlReader:
    """What NVML says of this process on one device, matched by UUID; None where it says nothing."""

    def __init__(self, uuid: str) -> None:
        self.per_process = False
        self._handle: Any = None
        self._lib: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._lib = pynvml
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
            pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
            self.per_process = True
            self.reason = "NVML's reading for this process"
        except Exception as error:  # the library is absent, too old, or forbidden here: each has a class of its own
            self.reason = f"change of the device's free memory: NVML gives no reading per process ({error})"

    def process_bytes(self) -> int | None:
        if not self.per_process:
            return None
        mine = [
            process.usedGpuMemory
            for process in self._lib.nvmlDeviceGetComputeRunningProcesses(self._handle)
            if process.pid == os.getpid()
        ]
        return sum(int(size) for size in mine if size)

    def free_bytes(self) -> int | None:
        if self._handle is None:
            return None
        return int(self._lib.nvmlDeviceGetMemoryInfo(self._handle).free)

    def driver(self) -> str | None:
        return str(self._lib.nvmlSystemGetDriverVersion()) if self._lib is not None else None
