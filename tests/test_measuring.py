"""`measure_memory` against allocations of known size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from orchestrator import MemoryReport, measure_memory
from orchestrator.device.fake import FakeDevice
from orchestrator.errors import ConfigError
from orchestrator.units import MiB


def test_each_kind_of_growth_has_its_line() -> None:
    device = FakeDevice(10_000, others_bytes=500)
    device.allocate(1000)
    with measure_memory(device) as report:
        assert report == MemoryReport()
        device.allocate(300)
        device.use(200)
        device.map(40)
        device.others_bytes = 450
    assert (report.torch_bytes, report.torch_peak_bytes) == (300, 500)
    assert (report.reserved_bytes, report.reserved_peak_bytes, report.fragmentation_bytes) == (300, 500, 0)
    assert (report.non_torch_bytes, report.others_bytes) == (40, -50)
    assert (report.source, report.source_reason) == ("nvml_process", "arithmetic")


def test_a_block_that_frees_has_a_negative_growth_and_no_peak() -> None:
    device = FakeDevice(1000)
    device.allocate(100)
    with measure_memory(device) as report:
        device.free(60)
    assert (report.torch_bytes, report.torch_peak_bytes) == (-60, 0)


def test_the_report_is_filled_when_the_block_fails() -> None:
    device = FakeDevice(1000)
    with pytest.raises(ZeroDivisionError), measure_memory(device) as report:
        device.allocate(7)
        raise ZeroDivisionError
    assert report.torch_bytes == 7


def test_on_a_cpu_the_resident_set_is_read() -> None:
    with measure_memory("cpu") as report:
        kept = bytearray(64 * MiB)
        gone = bytearray(128 * MiB)
        del gone
    assert report.torch_bytes == pytest.approx(64 * MiB, abs=8 * MiB)
    assert report.torch_peak_bytes == pytest.approx(192 * MiB, abs=8 * MiB)
    assert (report.source, report.non_torch_bytes) == ("rss", 0)
    del kept


def test_torchs_object_names_a_device_too() -> None:
    with measure_memory(torch.device("cpu")) as report:
        pass
    assert report.source_reason.startswith("resident set")


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "cpu:1", "", torch.device("meta"), 0])
def test_a_device_that_has_no_name_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match="give cpu, cuda or cuda:1"), measure_memory(name):
        pass
