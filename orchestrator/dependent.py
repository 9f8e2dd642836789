"""A start that ends with those that asked for it: `python -m orchestrator.dependent PID[,PID] here|server ...`.

The first is its parent; the other one is the sweep that the parent works for. The rest is as for
`python -m orchestrator`. `server` has the import server do it.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import threading
from collections.abc import Sequence

from orchestrator.signals import end_with_parent


def main(argv: Sequence[str]) -> int:
    """The exit code of the start."""
    askers, how, *arguments = argv
    parent, *sweep = map(int, askers.split(","))
    if not (end_with_parent(parent) and all(map(_end_after, sweep))):
        return 128 + signal.SIGTERM
    if how == "server":
        from orchestrator.zygote.__main__ import main as by_server

        return by_server(["run", *arguments])
    from orchestrator.__main__ import main as start

    return start(arguments)


def _end_after(pid: int) -> bool:
    """Send this process SIGTERM once one that is no parent is gone; whether it is still there. Linux only, as above."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except (OSError, AttributeError):
        return True
    threading.Thread(target=_watch, args=(descriptor,), name="end of a sweep", daemon=True).start()
    return True


def _watch(descriptor: int) -> None:
    select.select([descriptor], [], [])
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    # As in `orchestrator.__main__`.
    gc.freeze()
    sys.exit(exit_code)
