"""Starts that share a device: who is admitted, who waits and for whom, and what a dead start leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.device.fake import FakeDevice
from orchestrator.device.shared_cap import SharedCap
from orchestrator.errors import BudgetError, DeviceOutOfMemoryError
from orchestrator.opening import Place, admit, open_device
from orchestrator.promises import Desk
from orchestrator.units import GiB
from tests.starts import ROOT, environment
from tests.toy import Lines, composed

HOLDER = """
import sys, time
from pathlib import Path
from orchestrator.promises import Desk
desk = Desk(Path(sys.argv[1]))
with desk.alone("runs/other", print):
    kept = desk.promise(int(sys.argv[2]), "runs/other")
    if sys.argv[3] == "gate":
        print("ready", flush=True)
        time.sleep(600)
if sys.argv[3] == "settled":
    kept.settled(int(sys.argv[2]) // 2)
print("ready", flush=True)
time.sleep(600)
"""


def other_start(folder: Path, requested: int, how: str) -> subprocess.Popen[str]:
    """Another process that was promised memory and is `starting`, has `settled` on half of it, or has the `gate`."""
    command = [sys.executable, "-c", HOLDER, str(folder), str(requested), how]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def opened(device: FakeDevice, desk: Desk | None, util: float, lines: Lines | None = None) -> Place:
    config = composed(f"gpu.util={util}", "kv.bytes=auto")
    return open_device(device, config, "runs/this", lines or Lines(), desk)


def later(seconds: float, work: Callable[[], None]) -> threading.Thread:
    thread = threading.Timer(seconds, work)
    thread.start()
    return thread


def test_more_than_is_free_is_refused_before_the_device_is_opened() -> None:
    device = FakeDevice(round(79.15 * GiB), others_bytes=round((79.15 - 11.14) * GiB), context_bytes=GiB)
    with pytest.raises(BudgetError, match=r"15\.83 GiB of 79\.15.*only 11\.14 GiB are free; gpu\.util=0\.14 could"):
        opened(device, None, 0.2)
    assert device.non_torch_bytes == 0
    assert opened(device, None, 0.14).ledger.accounts["context"] == GiB


def test_a_size_asks_for_no_share_and_has_no_cap() -> None:
    device = FakeDevice(1000, others_bytes=900, context_bytes=10)
    place = open_device(device, composed("gpu.util=0.9", "kv.bytes=1KiB"), "runs/this", Lines())
    assert (device.limit_bytes, place.ledger.accounts["context"]) == (None, 10)


def test_on_a_cpu_nobody_is_refused() -> None:
    device = FakeDevice(1000, others_bytes=900, source="rss")
    assert opened(device, None, 0.9).ledger.requested_bytes == 900


def test_a_start_takes_its_promise_back(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "all" / "device")
    place = opened(FakeDevice(1000), desk, 0.6)
    (promise,) = desk.others().promises
    assert (promise.pid, promise.run_dir, promise.outstanding_bytes) == (os.getpid(), "runs/this", 600)
    place.ledger.held_bytes = 450
    place.settled()
    assert [each.outstanding_bytes for each in desk.others().promises] == [150]
    place.close()
    place.close()
    assert desk.others().promises == ()
    assert not desk.others().found_dead


def test_a_promise_is_read_whatever_its_runs_folder_is_called(tmp_path: Path) -> None:
    desk, longest = Desk(tmp_path / "device"), "/" + 2047 * "ü"
    kept = desk.promise(600, longest)
    assert [each.run_dir for each in desk.others().promises] == [longest]
    kept.settled(450)
    assert [each.outstanding_bytes for each in desk.others().promises] == [150]
    kept.close()


def test_what_a_start_may_still_need_under_load_is_left_for_it(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "device")
    process = other_start(tmp_path / "device", 400, "settled")
    try:
        device = FakeDevice(1000, others_bytes=200)
        with pytest.raises(BudgetError, match=rf"promised: 200 B to process {process.pid} \(runs/other\)") as no:
            opened(device, desk, 0.7)
        assert (no.value.wanted_bytes, no.value.free_bytes) == (700, 600)
        assert no.value.suggestions == {"gpu.util": "0.60"}
        opened(device, desk, 0.6)
    finally:
        kill(process)


def test_two_starts_at_once_are_both_admitted_where_both_fit(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "device")
    process = other_start(tmp_path / "device", 350, "starting")
    lines = Lines()
    try:
        opened(FakeDevice(1000), desk, 0.2, lines)
        assert lines.said == []
    finally:
        kill(process)


def test_a_start_waits_for_one_that_is_starting_and_says_so(tmp_path: Path) -> None:
    desk, lines = Desk(tmp_path / "device"), Lines()
    process = other_start(tmp_path / "device", 700, "starting")
    device = FakeDevice(1000)
    thread = later(0.3, lambda: kill(process))
    place = opened(device, desk, 0.6, lines)
    thread.join()
    waiting, waited = lines.said
    assert place.notes == [waited]
    assert waiting == f"waiting for process {process.pid} (runs/other)"
    assert waited.startswith("waited 0.")
    assert waited.endswith(f" s for process {process.pid} (runs/other)")


def test_a_start_waits_for_the_memory_of_one_that_was_killed(tmp_path: Path) -> None:
    desk, lines = Desk(tmp_path / "device"), Lines()
    kill(other_start(tmp_path / "device", 700, "settled"))
    device = FakeDevice(1000, others_bytes=700)

    def leave() -> None:
        device.others_bytes = 0

    thread = later(0.2, leave)
    opened(device, desk, 0.6, lines)
    thread.join()
    assert lines.said[0] == "waiting for the memory of a start that was killed"


def test_the_gate_is_free_when_its_holder_was_killed(tmp_path: Path) -> None:
    desk, lines = Desk(tmp_path / "device"), Lines()
    process = other_start(tmp_path / "device", 1, "gate")
    thread = later(0.3, lambda: kill(process))
    with desk.alone("runs/this", lines.info):
        assert lines.said[0] == f"waiting for process {process.pid} (runs/other), which measures this device"
    thread.join()


def test_where_bytes_are_read_from_the_whole_device_a_start_is_alone_until_it_is_over(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "device")
    for source, alone in (("device_delta", True), ("nvml_process", False)):
        place = opened(FakeDevice(1000, source=source), desk, 0.2)  # type: ignore[arg-type]
        times: list[float] = []

        def enter(times: list[float] = times) -> None:
            with desk.alone("runs/next", lambda line: None):
                times.append(time.monotonic())

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive() is alone
        place.settled()
        thread.join()
        place.close()


def test_a_refused_start_leaves_nothing_behind(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "device")
    with pytest.raises(BudgetError):
        admit(FakeDevice(1000, others_bytes=900), desk, 0.5, "runs/this", lambda line: None)
    assert desk.others().promises == ()
    with desk.alone("runs/this", lambda line: None):
        pass


def test_somebody_elses_folder_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "device").symlink_to(tmp_path / "real")
    with pytest.raises(PermissionError, match="belongs to somebody else"):
        Desk(tmp_path / "device")


def test_a_second_engine_of_a_process_has_a_budget_of_its_own() -> None:
    device = FakeDevice(1000, context_bytes=20)
    first = opened(device, None, 0.25).ledger
    assert (first.accounts["context"], device.limit_bytes) == (20, 230)
    device.allocate(200)
    second = opened(device, None, 0.25).ledger
    assert (second.accounts["context"], second.base_bytes, device.limit_bytes) == (0, 220, 450)
    device.allocate(250)
    reading = device.snapshot()
    assert (second.held_in(reading), second.non_torch_in(reading), second.fragmentation_in(reading)) == (250, 0, 0)
    with pytest.raises(DeviceOutOfMemoryError):
        device.allocate(1)


def test_engines_of_a_process_share_one_cap() -> None:
    class Start:
        pass

    caps: list[int | None] = []
    cap = SharedCap(caps.append)
    first, second, third = Start(), Start(), Start()
    cap.set(first, 300, reserved_before=5)
    cap.set(second, 200, reserved_before=150)
    cap.set(first, 310, reserved_before=0)
    cap.set(third, None, reserved_before=0)
    cap.leave(third)
    cap.leave(first)
    cap.leave(first)
    del second
    cap.set(third, 50, reserved_before=7)
    cap.leave(third)
    assert caps == [305, 505, 515, None, 515, 205, 57, None]
