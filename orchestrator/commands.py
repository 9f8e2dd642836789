"""How a command ends: its exit code, and its errors in a line each."""

from __future__ import annotations

import sys
from collections.abc import Callable

from orchestrator.errors import Interrupted, OrchestratorError
from orchestrator.signals import interruptible


def ended(work: Callable[[], int]) -> int:
    """The exit code of work that Ctrl-C and SIGTERM may end."""
    try:
        with interruptible():
            return work()
    except Interrupted as interrupt:
        return interrupt.exit_code
    except OrchestratorError as error:
        return told(error)


def told(error: OrchestratorError) -> int:
    """Say on stderr what is wrong; the exit code."""
    for line in str(error).splitlines():
        sys.stderr.write(f"error: {line}\n")
    return error.exit_code
