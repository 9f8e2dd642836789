"""A card's data sheet beside the device that is there: the device is read, and a sheet that contradicts it is named."""

from __future__ import annotations

from orchestrator.config import GpuSpec
from orchestrator.device.base import DeviceInfo
from orchestrator.units import format_gib

_SAME = 0.02
"""How far the total of a card may be from its sheet's, as a share: drivers keep more or less of it for themselves."""


def contradiction(spec: GpuSpec | None, device: DeviceInfo, *, total_given: bool) -> str | None:
    """One line where the data sheet is of another device than the one that is used; None where there is nothing to say.

    Args:
        total_given: whether `gpu.total_bytes` says what to take for the device's total, so that it cannot tell.
    """
    if spec is None or device.kind == "plan":
        return None
    found = f"{device.name}, {format_gib(device.total_bytes)} GiB"
    said = f"{spec.name}, {format_gib(spec.total_bytes)} GiB"
    other_total = not total_given and abs(device.total_bytes - spec.total_bytes) > _SAME * spec.total_bytes
    if device.kind == "cuda" and device.capability == spec.capability and not other_total:
        return None
    return f"gpu.spec describes another device ({said}) than this one ({found}): what is here is read, and decides"
