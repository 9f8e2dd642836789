"""A device whose memory is a number. Shipped, so that plugins' tests can run stages without hardware."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from orchestrator.device.base import DeviceInfo
from orchestrator.errors import DeviceOutOfMemoryError
from orchestrator.memory.snapshot import Snapshot, Source


class FakeDevice:
    """Memory by arithmetic, and a script of events.

    Args:
        total_bytes: of the device.
        others_bytes: held by other processes at first.
        context_bytes: what `open` takes, once.
        script: called one by one with the device, each after one reading was taken: what neighbours do meanwhile.
        dtypes: element types that the device has.
    """

    torch_device = "cpu"
    source_reason = "arithmetic"
    memory_slack_bytes = 0

    def __init__(
        self,
        total_bytes: int,
        *,
        others_bytes: int = 0,
        context_bytes: int = 0,
        script: Iterable[Callable[[FakeDevice], None]] = (),
        dtypes: Iterable[str] = ("float32", "bfloat16", "float16"),
        supports_graphs: bool = False,
        source: Source = "nvml_process",
    ) -> None:
        self.total_bytes, self.others_bytes = total_bytes, others_bytes
        self.context_bytes, self.supports_graphs = context_bytes, supports_graphs
        self.dtypes = frozenset(dtypes)
        self.allocated_bytes = self.non_torch_bytes = self.peak_bytes = 0
        self.limit_bytes: int | None = None
        self._source: Source = source
        self._script = iter(script)
        self._opened = False

    def open(self) -> None:
        if not self._opened:
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

    def free(self, size: int) -> None:
        self.allocated_bytes -= size

    def use(self, size: int) -> None:
        """Take and give back at once: a peak."""
        self.allocate(size)
        self.free(size)

    def info(self) -> DeviceInfo:
        return DeviceInfo("fake", "fake", self.total_bytes)

    def snapshot(self) -> Snapshot:
        ours = self.allocated_bytes + self.non_torch_bytes
        reading = Snapshot(
            total_bytes=self.total_bytes,
            free_bytes=self.total_bytes - self.others_bytes - ours,
            ours_bytes=ours,
            allocated_bytes=self.allocated_bytes,
            reserved_bytes=self.allocated_bytes,
            peak_bytes=self.peak_bytes,
            source=self._source,
        )
        event = next(self._script, None)
        if event is not None:
            event(self)
        return reading

    def reset_peak(self) -> None:
        self.peak_bytes = self.allocated_bytes

    def empty_cache(self) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def limit(self, allocator_bytes: int) -> None:
        self.limit_bytes = allocator_bytes

    def close(self) -> None:
        return None
