"""The accounts of a start, for any block of code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.device.base import Device
from orchestrator.errors import ConfigError
from orchestrator.memory.snapshot import Snapshot, Source

if TYPE_CHECKING:
    import torch


@dataclass
class MemoryReport:
    """What a block of code did to a device's memory, in bytes. Zeros until the block has ended.

    Attributes:
        torch_bytes: growth of live tensors.
        torch_peak_bytes: live tensors at the worst moment, above what was alive before.
        reserved_bytes: growth of what the allocator took from the device, its empty blocks given back before and after.
        reserved_peak_bytes: the same at the worst moment.
        fragmentation_bytes: growth of what the allocator reserved beyond live tensors.
        non_torch_bytes: growth of what this process holds outside the allocator: context, kernels, libraries.
        others_bytes: growth of what other processes hold; negative if they gave back.
        source: where this process's bytes come from, and why.
    """

    torch_bytes: int = 0
    torch_peak_bytes: int = 0
    reserved_bytes: int = 0
    reserved_peak_bytes: int = 0
    fragmentation_bytes: int = 0
    non_torch_bytes: int = 0
    others_bytes: int = 0
    source: Source = "rss"
    source_reason: str = ""


@contextmanager
def measure_memory(device: Device | torch.device | str = "cuda") -> Iterator[MemoryReport]:
    """Measure the block inside a `with`; the report is filled when it ends, also by an exception.

    On a CPU the resident set is all that can be read: torch and the rest are one there, and some MiB of noise remain.
    On a device whose neighbours cannot be told apart (`source` is `device_delta`), what they do counts as this
    process's.

    Args:
        device: `cpu`, `cuda`, `cuda:1`, as text or as torch's object, or a device that is used already. Its allocator's
            empty blocks are given back before and after the block, and its peak counters are reset.

    Raises:
        ConfigError: there is no such device.
    """
    where = device if isinstance(device, Device) else _named(str(device))
    where.open()
    report = MemoryReport()
    where.synchronize()
    where.empty_cache()
    where.reset_peak()
    before = where.snapshot()
    try:
        yield report
    finally:
        where.synchronize()
        peak = where.snapshot()
        where.empty_cache()
        _fill(report, before, peak, where.snapshot(), where.source_reason)


def _fill(report: MemoryReport, before: Snapshot, peak: Snapshot, after: Snapshot, reason: str) -> None:
    report.torch_bytes = after.allocated_bytes - before.allocated_bytes
    report.torch_peak_bytes = max(0, peak.peak_bytes - before.allocated_bytes)
    report.reserved_bytes = after.reserved_bytes - before.reserved_bytes
    report.reserved_peak_bytes = max(0, peak.peak_reserved_bytes - before.reserved_bytes)
    report.fragmentation_bytes = report.reserved_bytes - report.torch_bytes
    report.non_torch_bytes = after.ours_bytes - before.ours_bytes - report.reserved_bytes
    report.others_bytes = after.others_bytes - before.others_bytes
    report.source, report.source_reason = after.source, reason


def _named(name: str) -> Device:
    kind, _, index = name.partition(":")
    if kind == "cuda" and (index.isdigit() or not index):
        from orchestrator.device.cuda import CudaDevice

        return CudaDevice(int(index or 0))
    if name == "cpu":
        from orchestrator.device.cpu import CpuDevice

        return CpuDevice()
    raise ConfigError.of("device", "give cpu, cuda or cuda:1", name)
