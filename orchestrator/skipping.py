"""`run.skip_existing`: what has a valid record is not started again; any other record makes room and is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from orchestrator.config import Config
from orchestrator.dotted import leaves
from orchestrator.records import FILE_NAME, RunRecord, read_record, redact

_OF_NO_RESULT = ("run.dir", "run.skip_existing", "log.json")
"""Settings that change nothing in a run but where it is told of."""
_MOST_NAMED = 3


def valid_run(folder: Path | None, config: Config) -> RunRecord | None:
    """The record in `folder` if its run succeeded and was of this configuration."""
    record = _read(folder) if folder is not None else None
    return record if record is not None and record.status == "ok" and not _differing(record, config) else None


def make_room(folder: Path | None, config: Config) -> str:
    """Rename the record in `folder` to `run.1.json`, or the next number; a sentence that says why, if there is one."""
    record = _read(folder) if folder is not None else None
    kept = set_aside(folder) if folder is not None else None
    return "" if kept is None else f"not skipped: {folder} has {_what(record, config)}; it is kept as {kept.name}"


def set_aside(folder: Path) -> Path | None:
    """Rename the record in `folder`; its new path, None if there is no record."""
    if not (folder / FILE_NAME).exists():
        return None
    return (folder / FILE_NAME).rename(_free_name(folder))


def _what(record: RunRecord | None, config: Config) -> str:
    if record is None:
        return "a file that is not the record of a run"
    if record.status != "ok":
        return f"the record of a run that {'failed' if record.status == 'failed' else 'was interrupted'}"
    differing = _differing(record, config)
    named = ", ".join(f"{name} {then} then, {now} now" for name, (then, now) in list(differing.items())[:_MOST_NAMED])
    more = f" and {len(differing) - _MOST_NAMED} more" if len(differing) > _MOST_NAMED else ""
    return f"a run of another configuration ({named}{more})"


def _differing(record: RunRecord, config: Config) -> dict[str, tuple[str, str]]:
    """Setting -> what it was, and what it is."""
    # As the record has it: JSON, without secrets.
    now = _spelled(json.loads(redact(json.dumps(config.model_dump(mode="json", by_alias=True)))))
    then = _spelled(record.config)
    names = [name for name in {**then, **now} if name not in _OF_NO_RESULT]
    return {
        name: (then.get(name, "nothing"), now.get(name, "nothing")) for name in names if then.get(name) != now.get(name)
    }


def _spelled(config: dict[str, Any]) -> dict[str, str]:
    return {name: json.dumps(value) for name, value in leaves(config)}


def _read(folder: Path) -> RunRecord | None:
    try:
        return read_record(folder)
    except (OSError, ValueError):
        return None


def _free_name(folder: Path) -> Path:
    stem, _, suffix = FILE_NAME.partition(".")
    number = 1
    while (kept := folder / f"{stem}.{number}.{suffix}").exists():
        number += 1
    return kept
