"""Out of memory, told in one sentence: at which stage, on top of what, and what would help."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

from orchestrator.errors import DeviceOutOfMemoryError
from orchestrator.memory.ledger import Ledger
from orchestrator.memory.snapshot import Snapshot
from orchestrator.units import format_gib, format_size

_SAYINGS = ("out of memory", "can't allocate memory", "cannot allocate memory", "alloc_failed", "not enough memory")
"""How allocators and libraries put it; torch's own class for it is one of many."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation was refused, whoever says so."""
    if isinstance(error, DeviceOutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(saying in str(error).lower() for saying in _SAYINGS)


def explained(
    error: BaseException, slot: str, knobs: Sequence[str], ledger: Ledger, snapshot: Snapshot, *, has_ceiling: bool
) -> DeviceOutOfMemoryError:
    """The error that the record and the user get in place of `error`.

    Args:
        knobs: settings that make the stage take less.
        snapshot: taken after the refusal.
        has_ceiling: whether `gpu.util` limits the start; it does not where the KV cache's size is given.
    """
    first_line = (str(error) or type(error).__name__).splitlines()[0]
    held = ", ".join(f"{name} {format_size(size)}" for name, size in ledger.accounts.items() if size) or "nothing yet"
    may = f"the start may hold {format_gib(ledger.requested_bytes)} GiB (gpu.util={ledger.util:g}), "
    free = f"{format_gib(snapshot.free_bytes)} GiB of {format_gib(snapshot.total_bytes)} are free"
    help_ = [*(_more_room(ledger, snapshot) if has_ceiling else []), *knobs]
    advice = f"; would help: {', '.join(help_)}" if help_ else ""
    return DeviceOutOfMemoryError(
        f"stages.{slot}: out of memory ({first_line}); {may if has_ceiling else ''}charged so far: {held}; "
        f"{free}{advice}"
    )


def let_go(error: BaseException | None) -> None:
    """Empty the frames that an error keeps: their tensors would hold the memory that is to be given back."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _more_room(ledger: Ledger, snapshot: Snapshot) -> list[str]:
    """A greater share helps only where the device has more than this start asked for, and before the KV cache has taken
    what the share leaves."""
    there = ledger.held_in(snapshot) + snapshot.free_bytes
    helps = there > ledger.requested_bytes and ledger.util < 1 and not ledger.accounts["kv_cache"]
    return ["a greater gpu.util"] if helps else []
