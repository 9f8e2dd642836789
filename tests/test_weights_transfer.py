"""How bytes are cut into jobs, read by threads and copied: every byte once, nothing beyond the ring, no hang."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from orchestrator.config import WeightsConfig
from orchestrator.device.base import HostBuffer, Lane
from orchestrator.device.cpu import CpuDevice
from orchestrator.device.fake import FakeDevice
from orchestrator.device.host_lane import page_buffers
from orchestrator.engine.weights.files import CutOffError, RangeReader
from orchestrator.engine.weights.jobs import PAGE, Item, Job, jobs
from orchestrator.engine.weights.transfer import Transfer
from orchestrator.engine.weights.tuning import Tuning, tune
from orchestrator.errors import CheckpointError
from orchestrator.tensorfile import TensorEntry, read_header
from orchestrator.units import GiB, KiB, MiB


class Counted:
    def __init__(self) -> None:
        self.total = 0

    def advance(self, amount: int) -> None:
        self.total += amount


def tuning(threads: int = 3, chunk: int = 2 * PAGE, scratch: int = 1000, direct: bool = False) -> Tuning:
    return Tuning(threads, chunk, scratch, direct)


def random_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Of every size that matters: none, one, odd ones that push the next off its alignment, and large ones."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(), (0,), (3,), (1,), (5, 7), (64, 65), (2, 0, 3), (129, 257), (31,), (4096,), (1000, 33)]
    kinds = [torch.float32, torch.bfloat16, torch.uint8, torch.float16, torch.int64, torch.bool, torch.float64]
    found = {}
    for number, shape in enumerate(shapes * 2):
        values = torch.randint(0, 100, shape, generator=generator)
        found[f"t{number:02}"] = values.to(kinds[number % len(kinds)])
    return found


def unaligned_file(path: Path, tensors: dict[str, torch.Tensor]) -> list[TensorEntry]:
    """A file with its tensors in the order given, whatever that does to their alignment; writers sort them by size."""
    header: dict[str, Any] = {}
    data = b""
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8", torch.float16: "F16"}
    names |= {torch.int64: "I64", torch.bool: "BOOL", torch.float64: "F64"}
    for name, tensor in tensors.items():
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return list(read_header(path))


def filled(entries: Sequence[TensorEntry], how: Tuning, dtype: torch.dtype | None, device: Any = None) -> Any:
    kinds = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8, "F16": torch.float16}
    kinds |= {"I64": torch.int64, "BOOL": torch.bool, "F64": torch.float64}
    items: list[Item] = [(entry, torch.empty(entry.shape, dtype=dtype or kinds[entry.dtype])) for entry in entries]
    progress = Counted()
    with Transfer(device or CpuDevice(), how, progress) as transfer:
        transfer.fill(items)
    assert progress.total == sum(entry.nbytes for entry in entries)
    return {entry.name: tensor for entry, tensor in items}


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize(("threads", "chunk", "scratch"), [(1, PAGE, 8), (3, 2 * PAGE, 1000), (4, MiB, MiB)])
def test_equals_the_readers_own(
    direct: bool, dtype: torch.dtype | None, threads: int, chunk: int, scratch: int, tmp_path: Path
) -> None:
    tensors = random_tensors()
    entries = unaligned_file(tmp_path / "x.safetensors", tensors)
    assert any(entry.start % 8 for entry in entries if entry.dtype == "F64")
    found = filled(entries, tuning(threads, chunk, scratch, direct), dtype)
    for name, wanted in tensors.items():
        assert torch.equal(found[name], wanted.to(dtype) if dtype else wanted), name


def test_equals_safetensors_on_several_files_at_once(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.safetensors" for number in range(3)]
    for number, file in enumerate(files):
        save_file({f"{number}.{name}": value for name, value in random_tensors(number).items()}, file)
    entries = [entry for file in files for entry in read_header(file)]
    random.Random(0).shuffle(entries)
    found = filled(entries, tuning(), None)
    for file in files:
        for name, wanted in load_file(file).items():
            assert torch.equal(found[name], wanted), name


def items_in_one_slab(entries: Sequence[TensorEntry]) -> tuple[torch.Tensor, list[Item]]:
    base = entries[0].start
    slab = torch.zeros(entries[-1].end - base, dtype=torch.uint8)
    return slab, [(entry, slab[entry.start - base : entry.end - base].view(torch.float32)) for entry in entries]


def test_neighbours_are_read_and_copied_in_one_piece(tmp_path: Path) -> None:
    save_file({f"t{number:03}": torch.full((256,), float(number)) for number in range(100)}, tmp_path / "x")
    slab, items = items_in_one_slab(read_header(tmp_path / "x"))
    found = list(jobs(items, 16 * KiB, 16 * KiB))
    assert [len(job.pieces) for job in found] == [1] * len(found)
    assert len(found) == 7
    assert all(job.start % PAGE == 0 for job in found[1:])
    with Transfer(CpuDevice(), tuning(chunk=16 * KiB), Counted()) as transfer:
        transfer.fill(items)
    assert torch.equal(slab.view(torch.float32), torch.arange(100.0).repeat_interleave(256))


@pytest.mark.parametrize("seed", range(20))
def test_jobs_hold_every_byte_once_and_no_more_than_a_chunk(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    chunk, converted = rng.choice([PAGE, 3 * PAGE, MiB]), rng.choice([8, 24, 1000, MiB])
    entries = unaligned_file(tmp_path / "x", random_tensors(seed))
    if seed % 2:
        entries = rng.sample(entries, len(entries) // 2)
    items = [(entry, torch.empty(entry.shape, dtype=torch.float32)) for entry in entries]
    covered: list[tuple[int, int]] = []
    for job in jobs(items, chunk, converted):
        assert 0 < job.nbytes <= chunk
        assert all(last.stop == piece.start for last, piece in pairwise(job.pieces))
        assert all(piece.stop - piece.start <= converted for piece in job.pieces if piece.converted)
        covered += [(piece.start, piece.stop) for piece in job.pieces]
    covered.sort()
    assert all(last[1] <= piece[0] for last, piece in pairwise(covered))
    assert sum(stop - start for start, stop in covered) == sum(entry.nbytes for entry in entries)


class CountingLanes(FakeDevice):
    """A device that keeps what its lanes were asked for, and hands out host memory that is not its own."""

    def __init__(self) -> None:
        super().__init__(GiB)
        self.sizes: list[int] = []
        self.open_lanes = self.most_lanes = 0
        self.copied = 0
        self._lock = threading.Lock()

    @contextmanager
    def lane(self, size: int, scratch_bytes: int = 0) -> Iterator[Lane]:
        with self._lock:
            self.sizes.append(size)
            self.open_lanes += 1
            self.most_lanes = max(self.most_lanes, self.open_lanes)
        try:
            yield _CountingLane(self, size)
        finally:
            with self._lock:
                self.open_lanes -= 1


class _CountingLane:
    def __init__(self, device: CountingLanes, size: int) -> None:
        self._device, self._buffers = device, page_buffers(size, 2)

    def buffer(self) -> HostBuffer:
        self._buffers.reverse()
        return self._buffers[0]

    def copy(self, target: Any, source: Any, stored: Any) -> None:
        assert source.untyped_storage().data_ptr() == self._buffers[0].tensor.untyped_storage().data_ptr()
        target.copy_(source.clone().view(stored))
        self._device.copied += source.numel()


def test_host_memory_is_the_lanes_and_they_are_given_back(tmp_path: Path) -> None:
    save_file({"a": torch.randn(1000, 500), "b": torch.randn(300)}, tmp_path / "x")
    entries = list(read_header(tmp_path / "x"))
    device = CountingLanes()
    found = filled(entries, tuning(threads=2, chunk=4 * PAGE), torch.bfloat16, device)
    assert torch.equal(found["a"], load_file(tmp_path / "x")["a"].bfloat16())
    assert device.sizes == [6 * PAGE] * 2
    assert (device.open_lanes, device.most_lanes) == (0, 2)
    assert device.copied == sum(entry.nbytes for entry in entries)


def threads_of_ours() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("weights-")]


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_cut_off_while_it_is_read_names_the_tensor(direct: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    save_file({f"t{number}": torch.randn(5000) for number in range(20)}, tmp_path / "x")
    entries = list(read_header(tmp_path / "x"))
    with (tmp_path / "x").open("r+b") as file:
        file.truncate(entries[11].start + 100)
    with pytest.raises(CheckpointError, match=re.escape(f"cut off inside the tensor '{entries[11].name}'")) as caught:
        filled(entries[:12], tuning(direct=direct), dtype)
    assert str(tmp_path / "x") in str(caught.value)
    assert threads_of_ours() == []


def test_a_file_that_is_gone_names_the_tensor(tmp_path: Path) -> None:
    save_file({"a": torch.randn(10)}, tmp_path / "x")
    entries = list(read_header(tmp_path / "x"))
    (tmp_path / "x").unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read at the tensor 'a': .*No such file"):
        filled(entries, tuning(), None)


def test_an_error_of_a_lane_ends_the_load(tmp_path: Path) -> None:
    save_file({"a": torch.randn(1000, 500)}, tmp_path / "x")
    entries = list(read_header(tmp_path / "x"))

    class Broken(FakeDevice):
        def lane(self, size: int, scratch_bytes: int = 0) -> Any:
            raise torch.OutOfMemoryError("no room for a lane")

    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        filled(entries, tuning(), torch.bfloat16, Broken(GiB))
    assert threads_of_ours() == []


def test_a_type_that_is_not_computed_with_is_named(tmp_path: Path) -> None:
    save_file({"narrow": torch.zeros(4, dtype=torch.float8_e5m2)}, tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"'narrow' has the type F8_E5M2"):
        items = [(entry, torch.empty(entry.shape)) for entry in read_header(tmp_path / "x")]
        with Transfer(CpuDevice(), tuning(), Counted()) as transfer:
            transfer.fill(items)


INTERRUPTED = """
import sys, threading, torch
from pathlib import Path
from orchestrator.device.cpu import CpuDevice
from orchestrator.engine.weights.transfer import Transfer
from orchestrator.engine.weights.tuning import Tuning
from orchestrator.tensorfile import read_header

class Progress:
    told = False
    def advance(self, amount):
        if amount and not self.told:
            self.told = True
            print("reading", flush=True)

entries = read_header(Path(sys.argv[1])) * 400
items = [(entry, torch.empty(entry.shape, dtype=torch.bfloat16)) for entry in entries[:1]] * 400
try:
    with Transfer(CpuDevice(), Tuning(2, 65536, 65536, False), Progress()) as transfer:
        for _ in range(1000):
            transfer.fill(items)
except KeyboardInterrupt:
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("weights-")]
    print("interrupted", left, flush=True)
"""


def test_an_interrupt_ends_the_threads(tmp_path: Path) -> None:
    save_file({"a": torch.randn(1000, 500)}, tmp_path / "x")
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "x")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "interrupted []\n"
    assert process.returncode == 0


def test_a_range_reader_reads_any_range_directly_or_not(tmp_path: Path) -> None:
    content = random.Random(0).randbytes(5 * PAGE + 123)
    (tmp_path / "x").write_bytes(content)
    os.sync()
    rng = random.Random(1)
    buffer = page_buffers(8 * PAGE, 1)[0]
    for direct in (False, True):
        with RangeReader(direct=direct) as reader:
            for _ in range(40):
                descriptor = os.open(tmp_path / "x", os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
                start, stop = sorted(rng.sample(range(len(content) + 1), 2))
                lead = reader.read(tmp_path / "x", start, stop, buffer.view)
                assert bytes(buffer.view[lead : lead + stop - start]) == content[start:stop]
            with pytest.raises(CutOffError):
                reader.read(tmp_path / "x", len(content) - 10, len(content) + 10, buffer.view)
            assert (reader.direct_bytes > 0) <= direct


def options(**changes: Any) -> WeightsConfig:
    return WeightsConfig(**{"loader": "auto", "io": "auto", "threads": "auto", "chunk_bytes": "auto", **changes})


def test_the_tuning_fits_the_size() -> None:
    large = tune(options(), 16 * GiB, "cuda:0")
    assert large.threads * large.scratch_bytes <= 0.03 * 16 * GiB
    assert large.threads * 2 * large.chunk_bytes <= 512 * MiB
    assert tune(options(), 10 * KiB, "cuda:0").threads == 1
    assert tune(options(), 0, "cpu").threads == 1
    set_ = tune(options(threads=5, chunk_bytes="130KiB"), GiB, "cpu")
    assert (set_.threads, set_.chunk_bytes) == (5, 128 * KiB)


def test_past_the_page_cache_only_if_asked_or_if_the_files_do_not_fit_into_it() -> None:
    assert not tune(options(), GiB, "cpu").direct
    assert tune(options(), 1 << 60, "cpu").direct
    assert tune(options(io="direct"), GiB, "cpu").direct
    assert not tune(options(io="buffered"), 1 << 60, "cpu").direct


def test_a_job_is_a_range_of_one_file(tmp_path: Path) -> None:
    for name in ("x", "y"):
        save_file({name: torch.randn(64)}, tmp_path / name)
    entries = [*read_header(tmp_path / "x"), *read_header(tmp_path / "y")]
    found: list[Job] = list(jobs([(entry, torch.empty(entry.shape)) for entry in entries], MiB, MiB))
    assert [job.file.name for job in found] == ["x", "y"]


def test_reading_past_the_page_cache_of_a_file_system_that_has_only_that() -> None:
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    try:
        tensors = random_tensors()
        found = filled(unaligned_file(folder / "x", tensors), tuning(direct=True), None)
        assert all(torch.equal(found[name], wanted) for name, wanted in tensors.items())
    finally:
        shutil.rmtree(folder)
