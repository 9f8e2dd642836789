"""What is left to Hydra's own command line: help, printing the configuration, completion and sweeps."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from orchestrator.compose.folders import ConfigFolders
from orchestrator.compose.tree import CONFIG_NAME, VERSION_BASE

_RAISE = "HYDRA_FULL_ERROR"


def run_hydra(flags: Sequence[str], overrides: Sequence[str], folders: ConfigFolders, job: Callable[[Any], Any]) -> int:
    """Run Hydra's command line with `flags` and `overrides`, as its grammar spells them; its exit code.

    `job` is called with each composed configuration that Hydra would run.

    Raises:
        Exception: whatever a sweeper, a launcher or the job raises.
    """
    import hydra

    def task(tree: Any) -> Any:
        return job(tree)

    typed = sys.argv
    sys.argv = [typed[0], *flags, *overrides, *([folders.search_path_override()] if folders.others else [])]
    try:
        with _errors_raised():
            hydra.main(config_path=str(folders.main), config_name=CONFIG_NAME, version_base=VERSION_BASE)(task)()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv = typed
    return 0


@contextmanager
def _errors_raised() -> Iterator[None]:
    """Have Hydra raise what it would print as a traceback."""
    before = os.environ.get(_RAISE)
    os.environ[_RAISE] = "1"
    try:
        yield
    finally:
        os.environ.pop(_RAISE)
        if before is not None:
            os.environ[_RAISE] = before
