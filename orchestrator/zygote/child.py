"""What a forked process does to become a start that seems never to have been anything else."""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from orchestrator.clock import Clock
from orchestrator.errors import Interrupted
from orchestrator.records import ImportServerRecord
from orchestrator.signals import SIGNALS, end_with_parent, interruptible

_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Job:
    """A start that was asked for.

    Attributes:
        files: descriptors of the standard streams.
        learned: descriptor of the file that gets the names of the modules that the start imports itself.
    """

    request: dict[str, Any]
    files: Sequence[int]
    learned: int
    server: ImportServerRecord


def run(job: Job) -> int:
    """Do it; the exit code."""
    before = set(sys.modules)
    _become(job)
    from orchestrator.__main__ import main

    clock = Clock(job.request["zero"])
    server = job.server.model_copy(update={"request_s": clock.now()})
    try:
        with interruptible():
            # Blocked since before the fork.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            return main(job.request["arguments"], clock=clock, import_server=server)
    except Interrupted as interrupt:
        return interrupt.exit_code
    # The command line's own way to refuse what it cannot read.
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    finally:
        # Libraries' own clean-up follows, in which Ctrl-C would be a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _teach(job.learned, [name for name in list(sys.modules) if name not in before])


def _become(job: Job) -> None:
    request = job.request
    os.setsid()
    if not end_with_parent(job.server.pid):
        os._exit(1)
    for number, descriptor in enumerate(job.files):
        os.dup2(descriptor, number)
        os.close(descriptor)
    _use_streams(request["streams"])
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    os.umask(request["umask"])
    os.chdir(request["folder"])
    _limit(request["limits"])
    _use_cores(request["cores"])
    sys.path[:] = request["path"]
    sys.argv = [sys.modules["orchestrator"].__path__[0] + "/__main__.py", *request["arguments"]]
    importlib.invalidate_caches()
    gc.enable()


def _use_streams(streams: Sequence[Sequence[str] | None]) -> None:
    """New objects, because those of the server may have been made for a file of another kind. Whoever kept one of them
    writes to the same descriptor.
    """
    for number, (name, given) in enumerate(zip(("stdin", "stdout", "stderr"), streams, strict=True)):
        if given is None:
            stream = None
        else:
            lines = name == "stderr" or (name == "stdout" and os.isatty(number))
            stream = open(  # noqa: SIM115 - open as long as the process
                number,
                "r" if name == "stdin" else "w",
                buffering=1 if lines else -1,
                encoding=given[0],
                errors=given[1],
                closefd=False,
            )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _limit(limits: Sequence[Sequence[int]]) -> None:
    for kind, soft, hard in limits:
        # What the server itself may not raise any more.
        with suppress(ValueError, OSError):
            resource.setrlimit(kind, (soft, hard))


def _use_cores(cores: Sequence[int]) -> None:
    """The processors that the client may use; how many threads there may be was settled when libraries were loaded."""
    if set(cores) == os.sched_getaffinity(0):
        return
    import torch

    with suppress(OSError):
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(min(torch.get_num_threads(), len(cores)))


def _teach(descriptor: int, names: Sequence[str]) -> None:
    with suppress(OSError):
        data = json.dumps(names).encode()
        os.write(descriptor, data if len(data) <= _MOST_BYTES else b"[]")
