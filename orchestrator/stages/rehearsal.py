"""The worst step once more, as it will be in serving, with the peak of each of its parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from orchestrator.engine.base import Engine
from orchestrator.engine.remembering import RemembersSteps
from orchestrator.memory.snapshot import Peak, Snapshot
from orchestrator.stage import Context


@dataclass
class Rehearsal:
    """What the step took.

    Attributes:
        peak: of the whole step.
        parts: if they were measured, by part: live tensors at its worst moment that were gone after it, in bytes.
        loaded_bytes: what came to be held outside the allocator: kernels that had not been loaded before.
    """

    peak: Peak = field(default_factory=Peak)
    parts: dict[str, int] = field(default_factory=dict)
    loaded_bytes: int = 0


def rehearse(ctx: Context, engine: Engine, *, by_part: bool) -> Rehearsal:
    """Run the worst step, now that libraries are loaded, caches empty and graphs captured: what the allocator reserves
    for it, fragments included, is what serving must find free beside the KV cache.

    Args:
        by_part: whether to measure each part as well, of an engine that remembers steps.
    """
    device = ctx.device
    rehearsal = Rehearsal()
    device.empty_cache()
    device.reset_peak()
    before = device.snapshot()

    @contextmanager
    def around(part: str) -> Iterator[None]:
        device.reset_peak()
        start = device.snapshot()
        yield
        device.synchronize()
        end = device.snapshot()
        _saw(rehearsal.peak, before, end)
        ctx.ledger.saw(end)
        kept = max(0, end.allocated_bytes - start.allocated_bytes)
        rehearsal.parts[part] = max(0, end.peak_bytes - start.allocated_bytes - kept)

    with ctx.span("rehearsal"):
        if by_part and isinstance(engine, RemembersSteps):
            engine.repeat_parts(around)
        else:
            engine.repeat_worst_step()
        device.synchronize()
        _saw(rehearsal.peak, before, device.snapshot())
        device.empty_cache()
    after = device.snapshot()
    rehearsal.peak.kept_bytes = max(0, after.allocated_bytes - before.allocated_bytes)
    rehearsal.loaded_bytes = max(0, ctx.ledger.non_torch_in(after) - ctx.ledger.non_torch_in(before))
    return rehearsal


def _saw(peak: Peak, before: Snapshot, reading: Snapshot) -> None:
    peak.above_bytes = max(peak.above_bytes, reading.peak_bytes - before.allocated_bytes)
    peak.reserved_bytes = max(peak.reserved_bytes, reading.peak_reserved_bytes - before.reserved_bytes)
