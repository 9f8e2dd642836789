"""What the pipeline asks of a device. Small on purpose: a fake of it runs in a unit test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from orchestrator.memory.snapshot import Snapshot


@dataclass(frozen=True)
class DeviceInfo:
    """What identifies a device in a record. `capability` is CUDA's, as "9.0"."""

    kind: str
    name: str
    total_bytes: int
    driver: str | None = None
    capability: str | None = None
    uuid: str | None = None


@runtime_checkable
class Device(Protocol):
    """One device, opened: its context exists and its memory can be read."""

    @property
    def torch_device(self) -> str:
        """As torch names it, `cuda:0` or `cpu`."""

    @property
    def supports_graphs(self) -> bool: ...

    @property
    def dtypes(self) -> frozenset[str]:
        """Names of the element types that its kernels have."""

    @property
    def source_reason(self) -> str:
        """Why `Snapshot.source` is what it is."""

    @property
    def memory_slack_bytes(self) -> int:
        """How far a reading of this process may stray for reasons that no allocation of ours explains."""

    def open(self) -> None:
        """Make the context. The first thing that takes memory."""

    def info(self) -> DeviceInfo: ...

    def snapshot(self) -> Snapshot: ...

    def reset_peak(self) -> None: ...

    def empty_cache(self) -> None:
        """Give back what the allocator keeps for reuse."""

    def synchronize(self) -> None:
        """Wait until all work given to the device is done."""

    def limit(self, allocator_bytes: int) -> None:
        """Cap what the allocator may take from now on."""

    def close(self) -> None: ...
