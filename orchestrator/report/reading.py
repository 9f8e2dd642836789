"""A run's record by the path that a person gives, or a sentence about why there is none."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from orchestrator.errors import UserError
from orchestrator.records import FILE_NAME, RunRecord, read_record
from orchestrator.report.layout import one_line


def read_run(path: Path) -> RunRecord:
    """The record of a run's folder, or of its `run.json`.

    Raises:
        UserError: it cannot be read, or is not the record of a run.
    """
    try:
        return read_record(path)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(f"{path}: not the record of a run: {where}: {one_line(first['msg'])}") from None
    except OSError as error:
        what = f"the folder has no {FILE_NAME}" if path.is_dir() else error.strerror
        raise UserError(f"{path}: cannot be read: {what}") from None
    except ValueError as error:
        raise UserError(f"{path}: not the record of a run: {one_line(str(error))}") from None
