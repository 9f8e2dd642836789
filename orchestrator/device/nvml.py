"""What NVML says of this process on one device: the driver's management library, which makes no context."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class NvmlReader:
    """Readings of one device, matched by UUID, and of this process, matched by its id here or in an outer namespace.

    `per_process` turns false, with the `reason`, as soon as NVML proves not to tell this process apart. `open` must
    have been called for that to be known: a process without a context is in nobody's list.

    Args:
        uuid: with or without its prefix; of a GPU or of a MIG instance.
        library: the functions of `pynvml`; None for that package.
        status: the kernel's file about this process.
    """

    def __init__(self, uuid: str, *, library: Any = None, status: Path = Path("/proc/self/status")) -> None:
        self.per_process = False
        self.pids = own_pids(status)
        self._library: Any = None
        self._handle: Any = None
        self._total = self._last = 0
        try:
            self._library = library if library is not None else _pynvml()
            self._library.nvmlInit()
            self._handle = _handle(self._library, uuid)
            self._total = int(self._library.nvmlDeviceGetMemoryInfo(self._handle).total)
            self._library.nvmlDeviceGetComputeRunningProcesses(self._handle)
            self.per_process = True
            self.reason = "NVML's reading for this process"
        # The library is absent, too old, or forbidden here: each has a class of its own.
        except Exception as error:
            self._give_up(str(error))

    def opened(self) -> None:
        """To be called once the context exists: from then on this process must be in NVML's list."""
        if self.process_bytes() == 0:
            self._give_up(f"it does not list process {os.getpid()}, as in a container with process ids of its own")

    def process_bytes(self) -> int | None:
        """What this process holds; 0 while it has no context, None where NVML does not say. A reading that cannot be
        true repeats the last one: a context does not come and go."""
        if not self.per_process:
            return None
        try:
            self._last = self._listed() or self._last
            return self._last
        except Exception as error:
            self._give_up(str(error))
            return None

    def free_bytes(self) -> int | None:
        """Of the device, for anybody; None where NVML cannot be asked."""
        if self._handle is None:
            return None
        return int(self._library.nvmlDeviceGetMemoryInfo(self._handle).free)

    def driver(self) -> str | None:
        return str(self._library.nvmlSystemGetDriverVersion()) if self._handle is not None else None

    def _listed(self) -> int | None:
        """Bytes of this process, if it is in the list with a size that can be true."""
        sizes = [
            process.usedGpuMemory
            for process in self._library.nvmlDeviceGetComputeRunningProcesses(self._handle)
            if process.pid in self.pids
        ]
        # A size that is not available comes as None, or as the largest number there is.
        known = [int(size) for size in sizes if size is not None and 0 < int(size) <= self._total]
        return sum(known) if known else None

    def _give_up(self, why: str) -> None:
        self.per_process = False
        since = "before the context" if self._handle is not None else "the context was made, which is not counted"
        self.reason = f"change of the device's free memory since {since}: NVML gives no reading per process ({why})"


def own_pids(status: Path) -> frozenset[int]:
    """This process's id here, and those in the namespaces around it as far as the kernel tells."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        lines = []
    spaces = [line.split()[1:] for line in lines if line.startswith("NSpid:")]
    return frozenset({os.getpid(), *(int(pid) for pids in spaces for pid in pids)})


def _handle(library: Any, uuid: str) -> Any:
    """A MIG instance has a UUID of its own, and CUDA tells it without the prefix that NVML wants."""
    if uuid.startswith(("GPU-", "MIG-")):
        return library.nvmlDeviceGetHandleByUUID(uuid)
    try:
        return library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except Exception:
        return library.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")


def _pynvml() -> Any:
    import pynvml

    return pynvml


def installed(library: Any = None) -> tuple[str | None, list[str]]:
    """The driver's version and the names of all cards, without a context; nothing where NVML cannot be asked.

    Args:
        library: the functions of `pynvml`; None for that package.
    """
    try:
        library = library if library is not None else _pynvml()
        library.nvmlInit()
        handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
        return str(library.nvmlSystemGetDriverVersion()), [str(library.nvmlDeviceGetName(each)) for each in handles]
    except Exception:
        return None, []
