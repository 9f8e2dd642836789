"""What this machine's own copies reach: page cache to pinned memory, pinned memory to the GPU, page-locking a file."""

from __future__ import annotations

import mmap
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from orchestrator.units import MiB

_READ_ONLY = 8
"""cudaHostRegisterReadOnly: the mapping of a file that must not be written."""
Range = tuple[Path, int, int]


def ranges(files: list[Path], size: int, limit: int) -> list[Range]:
    """The first `limit` bytes of the files in whole ranges of `size` bytes."""
    found = [(file, at, at + size) for file in files for at in range(0, file.stat().st_size - size + 1, size)]
    return found[: max(1, limit // size)]


def rate(parts: list[Range], threads: int, work: Callable[[Iterator[Range]], None]) -> float:
    """Bytes per second of threads that share the parts; what `work` does before its first part is not timed."""
    lock, shared = threading.Lock(), iter(parts)
    # By the threads themselves: whoever waits for them may be woken late.
    begun: list[float] = []
    ended: list[float] = []
    errors: list[BaseException] = []
    ready = threading.Barrier(threads, action=lambda: begun.append(time.perf_counter()))

    def taken() -> Iterator[Range]:
        ready.wait()
        while True:
            with lock:
                part = next(shared, None)
            if part is None:
                ended.append(time.perf_counter())
                return
            yield part

    def run() -> None:
        try:
            work(taken())
        except BaseException as error:
            errors.append(error)
            ready.abort()

    workers = [threading.Thread(target=run) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return sum(stop - start for _, start, stop in parts) / (max(ended) - begun[0])


def page_cache_to_pinned(files: list[Path], threads: int, chunk: int, limit: int, *, pinned: bool) -> float:
    """Threads that read into one pinned buffer each, again and again; no GPU is involved."""

    def work(parts: Iterator[Range]) -> None:
        buffer = torch.empty(chunk, dtype=torch.uint8, pin_memory=pinned)
        view: Any = buffer.numpy()
        descriptors = {file: os.open(file, os.O_RDONLY) for file in files}
        for file, start, _ in parts:
            os.preadv(descriptors[file], [view], start)
        for descriptor in descriptors.values():
            os.close(descriptor)

    return rate(ranges(files, chunk, limit), threads, work)


def pinned_to_device() -> float:
    """One stream, buffers of 256 MiB."""
    size = 256 * MiB
    source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(8):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return 8 * size / (time.perf_counter() - start)


def locked_file(files: list[Path], threads: int, chunk: int, limit: int, copy: bool, populate: bool) -> float:
    """Page-lock the mapped file part by part, with `copy` also copy each part to the device, and unlock it.

    Raises:
        RuntimeError: the driver refuses; with its code.
    """
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    maps = {file: _mapped(file) for file in files}
    device = torch.device("cuda", torch.cuda.current_device())

    def work(parts: Iterator[Range]) -> None:
        torch.cuda.set_device(device)
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        target = torch.empty(chunk, dtype=torch.uint8, device=device)
        with torch.cuda.stream(stream):
            for file, start, stop in parts:
                mapping, tensor = maps[file]
                if populate:
                    mapping.madvise(22, start, stop - start)  # MADV_POPULATE_READ
                address = tensor.data_ptr() + start
                code = int(runtime.cudaHostRegister(address, stop - start, _READ_ONLY))
                if code != 0:
                    raise RuntimeError(f"cudaHostRegister: {code}")
                if copy:
                    target.copy_(tensor[start:stop], non_blocking=True)
                    stream.synchronize()
                runtime.cudaHostUnregister(address)

    return rate(ranges(files, chunk, limit), threads, work)


def _mapped(file: Path) -> tuple[mmap.mmap, torch.Tensor]:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        mapping = mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        os.close(descriptor)
    with warnings.catch_warnings():
        # Of a tensor over memory that cannot be written; nobody writes.
        warnings.simplefilter("ignore")
        return mapping, torch.frombuffer(mapping, dtype=torch.uint8)


def evict(files: Iterable[Path]) -> None:
    """Drop the files from the page cache, what is not written yet first."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def warm(files: Iterable[Path]) -> None:
    """Into the page cache."""
    page_cache_to_pinned(list(files), 16, 8 * MiB, 1 << 60, pinned=False)
