"""A start that ends with the process that asked for it: `python -m orchestrator.dependent PID here|server ...`.

The rest is as for `python -m orchestrator`. `server` has the import server do it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

_DIES_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of the kernel."""


def main(argv: Sequence[str]) -> int:
    """The exit code of the start."""
    parent, how, *arguments = argv
    if not _end_with(int(parent)):
        return 128 + signal.SIGTERM
    if how == "server":
        from orchestrator.zygote.__main__ import main as by_server

        return by_server(["run", *arguments])
    from orchestrator.__main__ import main as start

    return start(arguments)


def _end_with(parent: int) -> bool:
    """Ask the kernel for SIGTERM once the parent is gone; whether it is still there. Linux only; elsewhere nothing."""
    if sys.platform != "linux":
        return True
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGTERM)
    return os.getppid() == parent


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    # As in `orchestrator.__main__`.
    gc.freeze()
    sys.exit(exit_code)
