"""How a checkpoint is read: by how many threads, in what pieces, through the page cache or past it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil

from orchestrator.config import WeightsConfig
from orchestrator.engine.weights.jobs import PAGE
from orchestrator.units import KiB, MiB

_CHUNK_BYTES = {"cuda": 8 * MiB}
_HOST_CHUNK_BYTES = 16 * MiB
_MOST_THREADS = 12
_SCRATCH_SHARE = 0.03
"""Of the weights' bytes: what may be on the device beside them while their type changes."""
_LEAST_SCRATCH = 64 * KiB


@dataclass(frozen=True)
class Tuning:
    """
    Attributes:
        threads: that read.
        chunk_bytes: most bytes of one read, a multiple of a page. Host memory is twice that a thread.
        scratch_bytes: of the device, a thread, for what changes its type there.
        direct: past the page cache.
    """

    threads: int
    chunk_bytes: int
    scratch_bytes: int
    direct: bool


def tune(options: WeightsConfig, total_bytes: int, device: str) -> Tuning:
    """What the user set, and for what is `auto` what was fastest where it was measured.

    `io=auto` reads through the page cache, where the next start finds the files, unless they would not fit into it.

    Args:
        total_bytes: of the files.
        device: as torch names it.
    """
    kind = device.partition(":")[0]
    chunk = _CHUNK_BYTES.get(kind, _HOST_CHUNK_BYTES) if options.chunk_bytes == "auto" else int(options.chunk_bytes)
    chunk -= chunk % PAGE
    wanted = min(_MOST_THREADS, _cores()) if options.threads == "auto" else options.threads
    threads = max(1, min(wanted, -(-total_bytes // chunk)))
    scratch = min(chunk, max(_LEAST_SCRATCH, int(total_bytes * _SCRATCH_SHARE) // threads))
    direct = options.io == "direct" or (options.io == "auto" and total_bytes > psutil.virtual_memory().available)
    return Tuning(threads, chunk, scratch, direct)


def _cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
