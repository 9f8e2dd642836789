"""Files dropped from the page cache, so that a start finds them cold."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from orchestrator.read_ahead import is_cached

_SAMPLES = 256


def drop(files: Sequence[Path]) -> float:
    """Ask the kernel to forget `files`; the share of them that stayed, from 0 to 1, by samples.

    Some file systems live in memory, and pages that another process has mapped stay: so it is measured.
    """
    kept = asked = 0
    for path in files:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # What is not on the disk yet cannot be forgotten.
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            size = os.fstat(file).st_size
            step = max(1, size // _SAMPLES)
            kept += sum(is_cached(file, at) for at in range(0, size, step))
            asked += len(range(0, size, step))
        finally:
            os.close(file)
    return kept / asked if asked else 0.0
