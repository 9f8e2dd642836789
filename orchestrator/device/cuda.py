"""A CUDA device: the only file that knows torch.cuda and NVML."""

from __future__ import annotations

import os
from typing import Any

import torch

from orchestrator.device.base import DeviceInfo
from orchestrator.errors import ConfigError
from orchestrator.memory.snapshot import Snapshot, Source
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

    @property
    def dtypes(self) -> frozenset[str]:
        always = {"float32", "float16"}
        return frozenset(always | {"bfloat16"} if self._properties.major >= 8 else always)

    @property
    def source_reason(self) -> str:
        return self._nvml.reason

    def open(self) -> None:
        if self._opened:
            return
        self._free_at_start = self._nvml.free_bytes() or 0
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
            return Snapshot(self._total, free, held, 0, 0, 0, self._source)
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

    def close(self) -> None:
        if self._opened:
            torch.cuda.empty_cache()


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
