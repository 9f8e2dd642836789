"""Loaders side by side: from tmpfs, from the page cache, from a cold disk; beside them the machine's own copies.

    python -m tests.benchmarks.load_weights [--model internvl2_5_8b] [--layers N] [--disk FOLDER] [--memory FOLDER]

Writes the model's folder to both places first, and removes them at the end. Progress goes to the error stream; the
last line of the output is one JSON object, in GB/s where nothing else is said. Needs a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from orchestrator.checkpoint import Checkpoint, locate
from orchestrator.compose import compose
from orchestrator.config import WeightsConfig
from orchestrator.device.base import Device
from orchestrator.device.cpu import CpuDevice
from orchestrator.engine.build import _model_class
from orchestrator.engine.weights.transfer import Transfer
from orchestrator.engine.weights.tuning import Tuning, tune
from orchestrator.registry import Registry
from orchestrator.units import GiB, MiB
from tests.benchmarks import host_copy
from tests.gpu.write_checkpoint import write_checkpoint

_GRID = ((12, 8), (16, 8), (8, 16), (8, 8), (12, 4), (16, 2))
"""Threads, MiB of a read."""
_FEW = 3
"""Of the grid: what is measured from the page cache of a disk too."""
_COLD_BYTES = 5 * GiB
_PART_BYTES = 4 * GiB


class Silent:
    def advance(self, amount: int) -> None:
        return None


class Bench:
    """One device, one checkpoint in two places; each measurement adds to `result`, or says there why it failed."""

    def __init__(self, device: Device, memory: Path, disk: Path) -> None:
        self.device, self.on_memory, self.on_disk = device, _found(memory), _found(disk)
        self.cuda = device.torch_device.startswith("cuda")
        self.result: dict[str, Any] = {"bytes": self.on_memory.total_bytes}
        self._start = time.monotonic()

    def note(self, name: str, measure: Callable[..., Any], *arguments: Any) -> None:
        """One that cannot be had, for want of a package or a right, must not cost the others."""
        try:
            self.result[name] = measure(*arguments)
        except Exception as error:
            self.result[name] = f"{type(error).__name__}: {str(error)[:200]}"
        print(f"{time.monotonic() - self._start:6.1f} s  {name}: {self.result[name]}", file=sys.stderr, flush=True)

    def empty(self, checkpoint: Checkpoint, dtype: torch.dtype = torch.bfloat16) -> Any:
        config = AutoConfig.from_pretrained(checkpoint.folder)
        with torch.device("meta"):
            return _model_class(config, checkpoint.folder)._from_config(config, dtype=dtype).eval()

    def load(self, loader: str, checkpoint: Checkpoint, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
        """A whole load into a model on meta: seconds, GB/s, peak on the device over the weights, host memory."""
        model = self.empty(checkpoint, dtype)
        before = _locked_or_resident()
        self._reset_peak()
        start = time.perf_counter()
        Registry.discover().resolve("loaders", loader)().load(
            model, checkpoint, device=self.device, dtype=dtype, seed=0, progress=Silent(), options=_options()
        )
        self.device.synchronize()
        seconds = time.perf_counter() - start
        found = {"seconds": round(seconds, 3), "gb_s": _gb(checkpoint.total_bytes / seconds)}
        if self.cuda:
            weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
            found["peak_over_weights"] = round(self.device.snapshot().peak_reserved_bytes / weights, 4)
        found["host_bytes_after"] = _locked_or_resident() - before
        del model
        self._free()
        return found

    def reads(self, checkpoint: Checkpoint, tunings: dict[str, Tuning], limit: int | None = None) -> dict[str, Any]:
        """Reading alone, into memory that is there already; the second of two passes for each tuning."""
        from orchestrator.engine.weights.slabs import allocate

        model = self.empty(checkpoint)
        model.tie_weights()
        allocate(model, self.device.torch_device, torch.bfloat16, [entry.name for entry in checkpoint.tensors])
        targets = model.state_dict(keep_vars=True)
        items, size = [], 0
        for entry in checkpoint.tensors:
            if limit is None or size + entry.nbytes <= limit:
                items.append((entry, targets[entry.name]))
                size += entry.nbytes
        found = {}
        for name, tuning in tunings.items():
            if limit is not None:
                host_copy.evict(checkpoint.weight_files)
            start = time.perf_counter()
            with Transfer(self.device, tuning, Silent()) as transfer:
                opened = time.perf_counter()
                transfer.fill(items)
                filled = time.perf_counter()
            found[name] = {"gb_s": _gb(size / (filled - start)), "begin_s": round(opened - start, 3)}
        del model, targets, items
        self._free()
        return found

    def equal(self) -> bool:
        """Whether ours puts the same bytes on the device as transformers."""
        models = []
        for loader in ("safetensors", "transformers"):
            models.append(self.empty(self.on_memory))
            Registry.discover().resolve("loaders", loader)().load(
                models[-1], self.on_memory, device=self.device, dtype=torch.bfloat16, seed=0, progress=Silent(),
                options=_options(),
            )  # fmt: skip
        ours, theirs = (dict(model.state_dict()) for model in models)
        same = ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
        del models, ours, theirs
        self._free()
        return same

    def _reset_peak(self) -> None:
        self._free()
        self.device.reset_peak()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()

    def _free(self) -> None:
        gc.collect()
        self.device.empty_cache()


def _found(folder: Path) -> Checkpoint:
    config = compose(["model=auto", f"model.path={folder}"]).config
    return locate(config.model, make=lambda name: None, cache_dir=folder)  # type: ignore[arg-type,return-value]


def _options() -> WeightsConfig:
    return compose([]).config.weights


def _gb(rate: float) -> float:
    return round(rate / 1e9, 2)


def _locked_or_resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(bench: Bench, chunks: tuple[tuple[int, int], ...]) -> None:
    """Everything, the quick and the important first: what runs out of time loses the end."""
    memory_files, disk_files = (list(each.weight_files) for each in (bench.on_memory, bench.on_disk))
    grid = {f"{threads} x {chunk} MiB": (threads, chunk * MiB) for threads, chunk in chunks}
    scratch = tune(_options(), bench.on_memory.total_bytes, bench.device.torch_device).scratch_bytes
    tunings = {name: Tuning(threads, chunk, scratch, False) for name, (threads, chunk) in grid.items()}

    def own(files: list[Path], sizes: dict[str, tuple[int, int]]) -> dict[str, float]:
        return {
            name: _gb(host_copy.page_cache_to_pinned(files, threads, chunk, 1 << 60, pinned=bench.cuda))
            for name, (threads, chunk) in sizes.items()
        }

    if bench.cuda:
        bench.note("pinned_to_device", lambda: _gb(host_copy.pinned_to_device()))
    bench.note("tmpfs_own_copy", own, memory_files, grid)
    bench.note("tmpfs_reads", bench.reads, bench.on_memory, tunings)
    for name in ("tmpfs_first", "tmpfs_second", "tmpfs_safetensors"):
        bench.note(name, bench.load, "safetensors", bench.on_memory)
    for loader in ("fastsafetensors", "transformers"):
        bench.note(f"tmpfs_{loader}", bench.load, loader, bench.on_memory)
    bench.note("tmpfs_to_float16", bench.load, "safetensors", bench.on_memory, torch.float16)
    bench.note("equal_to_transformers", bench.equal)
    few = dict(list(grid.items())[:_FEW])
    bench.note("page_cache_own_copy", own, disk_files, few)
    bench.note("page_cache_reads", bench.reads, bench.on_disk, {name: tunings[name] for name in few})
    for loader in ("safetensors", "transformers"):
        bench.note(f"page_cache_{loader}", bench.load, loader, bench.on_disk)
    if bench.cuda:
        page_locks(bench, memory_files)
    cold = {
        f"{'direct' if direct else 'buffered'} {threads} x {chunk} MiB": Tuning(threads, chunk * MiB, scratch, direct)
        for direct in (False, True)
        for threads, chunk in ((12, 8), (8, 16))
    }
    bench.note("cold_reads", bench.reads, bench.on_disk, cold, _COLD_BYTES)


def page_locks(bench: Bench, files: list[Path]) -> None:
    """What it costs to skip the copy on the host: locking a mapped file's pages, alone and with the copy."""
    for threads, populate, copy in product((1, 4), (False, True), (False, True)):
        name = f"page_lock{'_and_copy' if copy else ''}{'_populated' if populate else ''} {threads} threads"
        bench.note(
            name, lambda *how: _gb(host_copy.locked_file(files, *how)), threads, 64 * MiB, _PART_BYTES, copy, populate
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="internvl2_5_8b")
    parser.add_argument("--layers", type=int, help="of the language model, for a smaller one")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="a folder on a disk")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a folder in tmpfs")
    arguments = parser.parse_args()
    places = [Path(tempfile.mkdtemp(prefix="weights-", dir=parent)) for parent in (arguments.memory, arguments.disk)]
    try:
        start = time.perf_counter()
        for place in places:
            write_checkpoint(arguments.model, place, layers=arguments.layers)
        device = _device()
        bench = Bench(device, *places)
        bench.result["written_s"] = round(time.perf_counter() - start, 1)
        bench.note("warmed", host_copy.warm, bench.on_disk.weight_files)
        measure(bench, _GRID)
        bench.result["device"] = device.info().name
        bench.result["ratios"] = ratios(bench.result)
        print(json.dumps(bench.result))
    finally:
        for place in places:
            shutil.rmtree(place, ignore_errors=True)


def _device() -> Device:
    if not torch.cuda.is_available():
        return CpuDevice()
    from orchestrator.device.cuda import CudaDevice

    device = CudaDevice()
    device.open()
    return device


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """Ours against the machine's own copy, and against the other loaders."""
    found: dict[str, float] = {}
    for place in ("tmpfs", "page_cache"):
        own, reads = result.get(f"{place}_own_copy"), result.get(f"{place}_reads")
        if isinstance(own, dict) and isinstance(reads, dict):
            best = max(each["gb_s"] for each in reads.values())
            found[f"{place}: best read / best own copy"] = round(best / max(own.values()), 3)
        ours = result.get(f"{place}_safetensors")
        for loader in ("transformers", "fastsafetensors"):
            other = result.get(f"{place}_{loader}")
            if isinstance(ours, dict) and isinstance(other, dict):
                found[f"{place}: safetensors / {loader}"] = round(ours["gb_s"] / other["gb_s"], 2)
    return found


if __name__ == "__main__":
    main()
