"""A device whose memory is a number. Shipped, so that plugins' tests can run stages without hardware."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from orchestrator.device.base import DeviceInfo, Graph, Lane, Reserved
from orchestrator.device.host_lane import host_lane
from orchestrator.errors import DeviceOutOfMemoryError
from orchestrator.memory.snapshot import Snapshot, Source


class FakeDevice:
    """Memory by arithmetic, and a script of events.

    Args:
        total_bytes: of the device.
        others_bytes: held by other processes at first.
        context_bytes: what `open` takes, once.
        source: with `device_delta`, what neighbours do counts as this process's, as it does on a real device.
        script: called one by one with the device, each after one reading was taken: what neighbours do meanwhile.
        dtypes: element types that the device has.
        granularity: of mapped memory; None for a device that maps none.
    """

    torch_device = "cpu"
    source_reason = "arithmetic"
    memory_slack_bytes = library_bytes = 0
    page_bytes = 1

    def __init__(
        self,
        total_bytes: int,
        *,
        others_bytes: int = 0,
        context_bytes: int = 0,
        script: Iterable[Callable[[FakeDevice], None]] = (),
        dtypes: Iterable[str] = ("float32", "bfloat16", "float16"),
        supports_graphs: bool = False,
        granularity: int | None = None,
        source: Source = "nvml_process",
    ) -> None:
        self.total_bytes, self.others_bytes = total_bytes, others_bytes
        self.context_bytes, self.supports_graphs = context_bytes, supports_graphs
        self.dtypes = frozenset(dtypes)
        self.allocated_bytes = self.non_torch_bytes = self.peak_bytes = 0
        self.limit_bytes: int | None = None
        self.granularity = granularity
        self.virtual_memory_refusal = None if granularity else "this fake maps no memory"
        self._source: Source = source
        self._free_at_start = self._allocated_before = 0
        self._script = iter(script)
        self._opened = False

    def open(self) -> None:
        """Another start on an open device finds the context made, and what earlier ones allocated beside its cap."""
        self._allocated_before = self.allocated_bytes
        if not self._opened:
            self._free_at_start = self.total_bytes - self.others_bytes - self.allocated_bytes - self.non_torch_bytes
            self.non_torch_bytes += self.context_bytes
            self._opened = True

    def allocate(self, size: int) -> None:
        """Take `size` bytes as the allocator would.

        Raises:
            DeviceOutOfMemoryError: more than is free, or more than the cap.
        """
        wanted = self.allocated_bytes + size
        free = self.total_bytes - self.others_bytes - self.non_torch_bytes - self.allocated_bytes
        if size > free or (self.limit_bytes is not None and wanted > self.limit_bytes):
            raise DeviceOutOfMemoryError(f"tried to allocate {size} bytes")
        self.allocated_bytes = wanted
        self.peak_bytes = max(self.peak_bytes, wanted)

    def map(self, size: int) -> None:
        """Take memory past the allocator.

        Raises:
            DeviceOutOfMemoryError: more than is free.
        """
        if size > self.total_bytes - self.others_bytes - self.non_torch_bytes - self.allocated_bytes:
            raise DeviceOutOfMemoryError(f"tried to map {size} bytes")
        self.non_torch_bytes += size

    def free(self, size: int) -> None:
        self.allocated_bytes -= size

    def use(self, size: int) -> None:
        """Take and give back at once: a peak."""
        self.allocate(size)
        self.free(size)

    def info(self) -> DeviceInfo:
        return DeviceInfo("fake", "fake", self.total_bytes)

    def snapshot(self) -> Snapshot:
        held = self.allocated_bytes + self.non_torch_bytes
        free = self.total_bytes - self.others_bytes - held
        reading = Snapshot(
            total_bytes=self.total_bytes,
            free_bytes=free,
            ours_bytes=self._change(free) if self._source == "device_delta" else held,
            allocated_bytes=self.allocated_bytes,
            reserved_bytes=self.allocated_bytes,
            peak_bytes=self.peak_bytes,
            peak_reserved_bytes=self.peak_bytes,
            source=self._source,
        )
        event = next(self._script, None)
        if event is not None:
            event(self)
        return reading

    def _change(self, free: int) -> int:
        return max(0, self._free_at_start - free, self.allocated_bytes) if self._opened else 0

    def process_bytes(self) -> int:
        held = self.allocated_bytes + self.non_torch_bytes
        return self._change(self.total_bytes - self.others_bytes - held) if self._source == "device_delta" else held

    def reset_peak(self) -> None:
        self.peak_bytes = self.allocated_bytes

    def empty_cache(self) -> None:
        return None

    def pin(self, tensor: Any) -> Any:
        return tensor

    def lane(self, size: int, scratch_bytes: int = 0) -> AbstractContextManager[Lane]:
        return host_lane(size)

    def synchronize(self) -> None:
        return None

    def limit(self, allocator_bytes: int | None) -> None:
        self.limit_bytes = None if allocator_bytes is None else self._allocated_before + allocator_bytes

    def reserve(self, size: int) -> Reserved:
        return _Mapped(self, size)

    def graph_pool(self) -> Any:
        return None

    def capture(self, work: Callable[[], Any], pool: Any) -> Graph:
        return _Repeated(work)

    def close(self) -> None:
        return None


class _Mapped:
    """Reserved addresses: host memory that is there at once, and counted as it is mapped."""

    def __init__(self, device: FakeDevice, size: int) -> None:
        self._device, self._size = device, size
        self.mapped_bytes = 0

    def rounded(self, size: int) -> int:
        step = self._device.granularity or 1
        return -(-size // step) * step

    def grow(self, size: int) -> int:
        missing = self.rounded(size) - self.mapped_bytes
        if missing > 0:
            self._device.map(missing)
            self.mapped_bytes += missing
        return self.mapped_bytes

    def tensor(self, dtype: str, shape: tuple[int, ...]) -> Any:
        import torch

        return torch.zeros(shape, dtype=getattr(torch, dtype))

    def close(self) -> None:
        self._device.non_torch_bytes -= self.mapped_bytes
        self.mapped_bytes = 0


class _Repeated:
    """Does the work again, and writes into the first outputs as a real graph does."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self.outputs = work()

    def replay(self) -> None:
        for old, new in zip(self.outputs, self._work(), strict=True):
            old.copy_(new)
