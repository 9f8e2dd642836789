from __future__ import annotations

import pytest

from orchestrator.device.fake import FakeDevice
from orchestrator.memory.ledger import ACCOUNTS, Ledger
from orchestrator.memory.snapshot import Snapshot


def test_both_identities_hold() -> None:
    device = FakeDevice(1000, others_bytes=300, context_bytes=20)
    device.open()
    ledger = Ledger(total_bytes=1000, util=0.5, source="nvml_process")
    ledger.charge("context", 20)
    for account, size in (("weights", 100), ("kv_cache", 200)):
        device.allocate(size)
        ledger.charge(account, size)
    device.allocate(7)
    ledger.charge("peak_activation", 30)
    ledger.read_at_rest(device.snapshot())
    assert ledger.held_bytes == 327 == ledger.accounted_bytes + ledger.residual_bytes
    assert ledger.residual_bytes == 7
    assert ledger.requested_bytes == 500 == ledger.held_bytes + 30 + ledger.unused_bytes
    assert ledger.other_processes_bytes == 300


def test_what_the_process_held_before_is_not_this_starts() -> None:
    device = FakeDevice(1000)
    device.allocate(400)
    ledger = Ledger(total_bytes=1000, util=0.5, source="nvml_process", base_bytes=400)
    device.allocate(50)
    snapshot = device.snapshot()
    assert (ledger.held_in(snapshot), ledger.others_in(snapshot)) == (50, 400)


def test_a_peak_between_readings_counts() -> None:
    device = FakeDevice(1000)
    ledger = Ledger(total_bytes=1000, util=0.5, source="nvml_process")
    device.allocate(10)
    device.use(90)
    ledger.saw(device.snapshot())
    device.reset_peak()
    ledger.saw(device.snapshot())
    assert ledger.peak_held_bytes == 100


def test_unknown_accounts_and_negative_sizes_are_refused() -> None:
    ledger = Ledger(total_bytes=1000, util=0.5, source="rss")
    with pytest.raises(KeyError, match="no account 'kvcache'"):
        ledger.charge("kvcache", 1)
    with pytest.raises(ValueError, match="weights cannot be -1"):
        ledger.charge("weights", -1)
    assert set(ledger.accounts) == set(ACCOUNTS)


def test_fragments_of_the_allocator_are_not_taken_for_other_memory() -> None:
    ledger = Ledger(
        total_bytes=1000,
        util=0.5,
        source="nvml_process",
        base_bytes=200,
        base_reserved_bytes=150,
        base_allocated_bytes=140,
    )
    reading = Snapshot(
        total_bytes=1000,
        free_bytes=500,
        ours_bytes=430,
        allocated_bytes=300,
        reserved_bytes=350,
        peak_bytes=300,
        peak_reserved_bytes=350,
        source="nvml_process",
    )
    assert (ledger.held_in(reading), ledger.reserved_in(reading)) == (230, 200)
    assert (ledger.fragmentation_in(reading), ledger.non_torch_in(reading)) == (40, 30)


def test_a_reading_below_what_is_known_gives_no_negative_account() -> None:
    ledger = Ledger(total_bytes=1000, util=0.5, source="device_delta", base_bytes=200, base_reserved_bytes=150)
    reading = Snapshot(1000, 2000, 0, 100, 50, 100, 50, "device_delta")
    for size in (ledger.held_in, ledger.reserved_in, ledger.fragmentation_in, ledger.non_torch_in, ledger.others_in):
        assert size(reading) == 0
