"""Where the cache of a start lies unless its configuration says otherwise. As `conf/cache/disk.yaml` has it."""

from __future__ import annotations

from collections.abc import Mapping

FOLDER_VARIABLE = "ORCHESTRATOR_CACHE"
_DEFAULT = "~/.cache/orchestrator"


def usual_folder(environment: Mapping[str, str]) -> str:
    """As given; `~` is not expanded."""
    return environment.get(FOLDER_VARIABLE, _DEFAULT)
