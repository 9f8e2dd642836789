"""Where this process's bytes are read: NVML and its gaps, and the control group's limit."""

# ruff: noqa: N802, N815  (the names are the library's)

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from orchestrator.device.cgroup import cgroup_limit
from orchestrator.device.cpu import CpuDevice
from orchestrator.device.nvml import NvmlReader, own_pids
from orchestrator.units import GiB

UUID = "0c73f593-5c06-b105-6783-ec64d3ff6af9"


@dataclass
class Process:
    pid: int
    usedGpuMemory: int | None


@dataclass
class Memory:
    total: int = 80 * GiB
    free: int = 60 * GiB


@dataclass
class Driver:
    """A management library with a list of processes."""

    processes: list[Process] = field(default_factory=list)
    known: str = f"GPU-{UUID}"
    allowed: bool = True

    def nvmlInit(self) -> None:
        return None

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != self.known:
            raise LookupError("Not Found")
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Process]:
        if not self.allowed:
            raise PermissionError("Insufficient Permissions")
        return self.processes

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Memory:
        return Memory()

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580"


def status(folder: Path, *pids: int) -> Path:
    path = folder / "status"
    path.write_text("Name:\tpython\nNSpid:\t" + "\t".join(str(pid) for pid in pids) + "\nThreads:\t1\n")
    return path


def test_a_process_is_found_by_its_id(tmp_path: Path) -> None:
    driver = Driver([Process(1, 5 * GiB), Process(os.getpid(), GiB), Process(os.getpid(), 2 * GiB)])
    reader = NvmlReader(UUID, library=driver)
    reader.opened()
    assert (reader.per_process, reader.process_bytes()) == (True, 3 * GiB)


def test_a_process_is_found_by_its_id_outside(tmp_path: Path) -> None:
    reader = NvmlReader(UUID, library=Driver([Process(54321, GiB)]), status=status(tmp_path, 54321, 7))
    reader.opened()
    assert reader.process_bytes() == GiB
    assert own_pids(tmp_path / "missing") == {os.getpid()}


def test_before_the_context_nothing_is_held(tmp_path: Path) -> None:
    reader = NvmlReader(UUID, library=Driver([Process(1, GiB)]))
    assert (reader.per_process, reader.process_bytes(), reader.free_bytes()) == (True, 0, 60 * GiB)


ABSURD = pytest.mark.parametrize(
    "processes",
    [
        [],
        [Process(999_999_999, GiB)],
        [Process(os.getpid(), None)],
        [Process(os.getpid(), (1 << 64) - 1)],
        [Process(os.getpid(), -1)],
        [Process(os.getpid(), 0)],
    ],
    ids=["empty", "somebody else", "not available", "the largest number", "negative", "nothing"],
)


@ABSURD
def test_a_reading_that_cannot_be_true_is_no_change(processes: list[Process]) -> None:
    driver = Driver([Process(os.getpid(), 2 * GiB)])
    reader = NvmlReader(UUID, library=driver)
    reader.opened()
    seen = []
    for driver.processes in (processes, [Process(os.getpid(), GiB)], processes):
        seen.append(reader.process_bytes())
    assert seen == [2 * GiB, GiB, GiB]


@ABSURD
def test_where_nvml_does_not_tell_the_whole_device_is_read_and_it_is_said(processes: list[Process]) -> None:
    reader = NvmlReader(UUID, library=Driver(processes))
    reader.opened()
    assert reader.process_bytes() is None
    assert reader.reason.startswith("change of the device's free memory since before the context: NVML gives no")
    assert str(os.getpid()) in reader.reason


@pytest.mark.parametrize(("driver", "why"), [(Driver(allowed=False), "Permissions"), (Driver(known="x"), "Not Found")])
def test_what_keeps_nvml_from_telling_is_in_the_reason(driver: Driver, why: str) -> None:
    reader = NvmlReader(UUID, library=driver)
    assert not reader.per_process
    assert why in reader.reason
    assert ("since before the context" in reader.reason) is (reader.free_bytes() is not None)


@pytest.mark.parametrize("uuid", ["MIG-1a", "1a"])
def test_a_mig_instance_is_found_by_its_own_uuid(uuid: str) -> None:
    assert NvmlReader(uuid, library=Driver(known="MIG-1a")).per_process


def group_files(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/memory.max": "max\n"}, None),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/memory.max": "4096\n"}, 4096),
        ({"proc/self/cgroup": "0::/a/b\n", f"{V2}/a/b/memory.max": "4096\n", f"{V2}/a/memory.max": "9000\n"}, 4096),
        ({"proc/self/cgroup": "0::/a/b\n", f"{V2}/a/b/memory.max": "max\n", f"{V2}/a/memory.max": "9000\n"}, 9000),
        ({"proc/self/cgroup": "0::/docker/elsewhere\n", f"{V2}/memory.max": "5000\n"}, 5000),
        ({"proc/self/cgroup": "0::/../outside\n", f"{V2}/memory.max": "5000\n"}, 5000),
        ({"proc/self/cgroup": "5:cpu,memory:/j\n1:name=x:/q\n", f"{V1}/j/memory.limit_in_bytes": "7000\n"}, 7000),
        ({"proc/self/cgroup": "5:memory:/\n", f"{V1}/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ({f"{V2}/memory.max": "4096\n"}, 4096),
        ({"proc/self/cgroup": "0::/a\n", f"{V2}/a/memory.max": "nonsense\n"}, None),
    ],
)
def test_the_limit_of_the_processs_own_group(tmp_path: Path, files: dict[str, str], limit: int | None) -> None:
    assert cgroup_limit(group_files(tmp_path, files)) == limit


def test_a_cpu_has_no_more_than_its_group_allows() -> None:
    limit = cgroup_limit()
    assert limit is None or CpuDevice().info().total_bytes <= limit
