"""Opening a device: whether it has the room, whom to wait for, and the ledger's first lines."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from orchestrator.card import contradiction
from orchestrator.config import Config
from orchestrator.device.base import Device
from orchestrator.events import Events
from orchestrator.memory.budget import refuse_if_not_free, requested_bytes
from orchestrator.memory.ledger import Ledger
from orchestrator.memory.snapshot import Snapshot
from orchestrator.promises import Desk, Kept, Others, desk_of

_POLL_S = 0.05
_SETTLE_S = 5.0
"""How long a driver may take to give back what a killed process held."""


@dataclass
class Place:
    """A start's place on its device: its ledger, what it was promised, and the gate where it must be alone."""

    ledger: Ledger
    notes: list[str]
    """For whom it waited, and how long; that `gpu.spec` describes another device."""
    _promise: Kept | None
    _gate: ExitStack

    def settled(self) -> None:
        """The start is over: others may measure, and what it does not hold by now is only for its peaks."""
        self._gate.close()
        if self._promise is not None:
            self._promise.settled(self.ledger.held_bytes)

    def close(self) -> None:
        """Take the promise back. May be called again."""
        self._gate.close()
        if self._promise is not None:
            self._promise.close()


def open_device(device: Device, config: Config, run_dir: str, events: Events, desk: Desk | None = None) -> Place:
    """Open the device; the ledger begins with what the process held before, and the context is its first account.

    With `kv.bytes=auto` the start asks for a share of the device. It is admitted if that share is free and promised to
    nobody else; it waits while others that were promised memory are starting, and for what a killed start held. With a
    size in `kv.bytes` no share is asked for, and the allocator has no cap. A CPU's memory is everybody's: nobody is
    refused, and nobody waits.

    Starts make their contexts one after the other. Where a process's own bytes cannot be read, a start is alone until
    it is over, because another one would be taken for a part of it.

    Args:
        desk: of the device; None for the one in the machine's temporary folder.

    Raises:
        BudgetError: the share is not free.
    """
    shared = device.snapshot().source != "rss"
    desk = desk or (_desk(device, events) if shared else None)
    notes: list[str] = []

    def say(line: str) -> None:
        events.info(line)
        notes.append(line)

    promise = admit(device, desk, config.gpu.util, run_dir, say) if shared and _asks_share(config) else None
    with ExitStack() as undo:
        if promise is not None:
            undo.callback(promise.close)
        gate = undo.enter_context(ExitStack())
        if desk is not None:
            gate.enter_context(desk.alone(run_dir, say))
        ledger = _first_lines(device, config)
        if ledger.source != "device_delta":
            gate.close()
        undo.pop_all()
    kept = [line for line in notes if line.startswith("waited")]
    if line := contradiction(config.gpu.spec, device.info(), total_given=config.gpu.total_bytes is not None):
        events.info(line)
        kept.append(line)
    return Place(ledger, kept, promise, gate)


def _asks_share(config: Config) -> bool:
    return config.kv.bytes == "auto"


def _first_lines(device: Device, config: Config) -> Ledger:
    before = device.snapshot()
    device.open()
    after = device.snapshot()
    # On a CPU, what opening took is the interpreter's, not the start's.
    base = after if after.source == "rss" else before
    ledger = Ledger(
        total_bytes=after.total_bytes,
        util=config.gpu.util,
        source=after.source,
        source_reason=device.source_reason,
        base_bytes=base.ours_bytes,
        base_reserved_bytes=base.reserved_bytes,
        base_allocated_bytes=base.allocated_bytes,
    )
    ledger.charge("context", ledger.non_torch_in(after))
    ledger.other_processes_at_start_bytes = ledger.other_processes_bytes = ledger.others_in(after)
    # From the first tensor on: a profile that would pass the ceiling fails instead.
    ceiling = max(0, ledger.requested_bytes - ledger.accounts["context"] - device.library_bytes)
    device.limit(ceiling if _asks_share(config) else None)
    return ledger


def _desk(device: Device, events: Events) -> Desk | None:
    uuid = device.info().uuid
    if uuid is None:
        return None
    try:
        return desk_of(uuid)
    except OSError as error:
        events.warning(f"starts on this device cannot wait for each other: {error}")
        return None


def admit(device: Device, desk: Desk | None, util: float, run_dir: str, say: Callable[[str], None]) -> Kept | None:
    """Wait until `util` of the device is there for this start, and have it promised; None where nobody keeps promises.

    Raises:
        BudgetError: it is not free, and nobody is starting or has just ended whose memory may come back.
    """
    if desk is None:
        _refuse(device.snapshot(), util, Others(()))
        return None
    start, waited_for, patience = time.monotonic(), "", 0.0
    while True:
        with desk.alone(run_dir, say):
            others, reading = desk.others(), device.snapshot()
            wanted = requested_bytes(reading.total_bytes, util)
            if wanted <= reading.free_bytes - others.outstanding_bytes:
                promise = desk.promise(wanted, run_dir)
                break
        if others.found_dead:
            patience = time.monotonic() + _SETTLE_S
        if not others.starting and time.monotonic() >= patience:
            _refuse(reading, util, others)
        if not waited_for:
            waited_for = ", ".join(each.holder for each in others.starting) or "the memory of a start that was killed"
            say(f"waiting for {waited_for}")
        time.sleep(_POLL_S)
    if waited_for:
        say(f"waited {time.monotonic() - start:.1f} s for {waited_for}")
    return promise


def _refuse(reading: Snapshot, util: float, others: Others) -> None:
    refuse_if_not_free(
        total_bytes=reading.total_bytes,
        util=util,
        free_bytes=max(0, reading.free_bytes - others.outstanding_bytes),
        promised={each.holder: each.outstanding_bytes for each in others.promises if each.outstanding_bytes},
    )
