from __future__ import annotations

import subprocess
import sys

import pytest

from orchestrator.clock import Clock
from orchestrator.device.base import Device
from orchestrator.device.cpu import CpuDevice
from orchestrator.device.fake import FakeDevice
from orchestrator.errors import ConfigError, DeviceOutOfMemoryError
from orchestrator.memory.snapshot import peak_of
from orchestrator.units import MiB


def test_the_devices_keep_the_protocol() -> None:
    assert isinstance(CpuDevice(), Device)
    assert isinstance(FakeDevice(1), Device)


def test_a_peak_on_the_cpu_is_seen_after_it_is_gone() -> None:
    device = CpuDevice()
    device.open()
    with peak_of(device) as peak:
        kept = bytearray(64 * MiB)
        gone = bytearray(128 * MiB)
        del gone
    assert peak.above_bytes == pytest.approx(192 * MiB, abs=8 * MiB)
    assert peak.kept_bytes == pytest.approx(64 * MiB, abs=8 * MiB)
    del kept


def test_the_cpus_free_memory_is_within_its_total() -> None:
    reading = CpuDevice().snapshot()
    assert 0 < reading.ours_bytes < reading.total_bytes
    assert 0 < reading.free_bytes < reading.total_bytes
    assert reading.others_bytes >= 0
    assert CpuDevice(total_bytes=512 * MiB).snapshot().total_bytes == 512 * MiB


def test_a_fake_devices_memory_is_a_number() -> None:
    device = FakeDevice(100, others_bytes=30, context_bytes=5)
    device.open()
    device.open()
    device.allocate(20)
    device.use(40)
    reading = device.snapshot()
    assert (reading.ours_bytes, reading.free_bytes, reading.peak_bytes, reading.others_bytes) == (25, 45, 60, 30)


def test_a_fake_device_refuses_what_is_not_free_and_what_passes_its_cap() -> None:
    device = FakeDevice(100, others_bytes=30)
    with pytest.raises(DeviceOutOfMemoryError):
        device.allocate(71)
    device.limit(50)
    device.allocate(50)
    with pytest.raises(DeviceOutOfMemoryError):
        device.allocate(1)


def test_a_script_plays_between_readings() -> None:
    def leaves(device: FakeDevice) -> None:
        device.others_bytes = 0

    device = FakeDevice(100, others_bytes=30, script=[leaves])
    assert [device.snapshot().free_bytes for _ in range(3)] == [70, 100, 100]


def test_a_cuda_device_that_is_not_there_is_named() -> None:
    from orchestrator.device.cuda import CudaDevice

    with pytest.raises(ConfigError, match=r"gpu\.index=7: no such CUDA device"):
        CudaDevice(7)


def test_the_clock_counts_from_the_start_of_the_process() -> None:
    code = (
        "import time; time.sleep(0.3); from orchestrator.clock import Clock; "
        "print(Clock.since_process_start().now(), Clock.from_now().now())"
    )
    seconds = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert float(seconds[0]) >= 0.29
    assert float(seconds[1]) < 0.29
    assert Clock.from_now().now() >= 0
