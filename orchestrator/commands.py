"""How a command ends: its exit code, and its errors in a line each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from orchestrator.errors import Interrupted, OrchestratorError, UserError
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
    except FileNotFoundError:
        try:
            current_folder()
        except UserError as error:
            return told(error)
        raise


def current_folder() -> str:
    """
    Raises:
        UserError: it has been deleted.
    """
    try:
        return os.getcwd()  # noqa: PTH109 - as the process was given it
    except FileNotFoundError:
        raise UserError("the current folder has been deleted; change to one that exists") from None


def told(error: OrchestratorError) -> int:
    """Say on stderr what is wrong; the exit code."""
    for line in str(error).splitlines():
        sys.stderr.write(f"error: {line}\n")
    return error.exit_code
