"""The folder of a run: a new one each time, also for runs in the same second."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path

from orchestrator.clock import Clock
from orchestrator.errors import ConfigError
from orchestrator.records import FILE_NAME

PARENT = Path("runs")


def new_run_dir(wanted: Path | None) -> Path:
    """Make the folder: `wanted`, or one under `runs/` named by the time.

    Raises:
        ConfigError: it holds a record already (nothing is overwritten), or cannot be made.
    """
    try:
        if wanted is None:
            return _numbered(PARENT / datetime.now().strftime("%Y-%m-%d_%H-%M-%S"))
        wanted.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        place = wanted or PARENT
        raise ConfigError.of("run.dir", f"cannot make the folder: {error.strerror}", place) from None
    if (wanted / FILE_NAME).exists():
        raise ConfigError.of(
            "run.dir", "holds the record of an earlier run; give another folder, or leave run.dir out", wanted
        )
    return wanted


def _numbered(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        candidate = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            candidate.mkdir()
            return candidate
        except FileExistsError:
            number += 1


def run_id(folder: Path) -> str:
    """A name for the run that no other has."""
    return f"{folder.resolve().name}-{secrets.token_hex(4)}"


def started_at(clock: Clock) -> str:
    """The clock's zero on the wall clock, in UTC."""
    return (datetime.now(UTC) - timedelta(seconds=clock.now())).isoformat(timespec="milliseconds")
