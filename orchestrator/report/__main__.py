"""`python -m orchestrator.report RUN_DIR [RUN_DIR ...]`: show a run, or compare several."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from orchestrator.errors import UserError, near_miss
from orchestrator.events import leave_unread
from orchestrator.records import FILE_NAME, RunRecord
from orchestrator.report.compare import compare
from orchestrator.report.flat import as_csv, as_markdown
from orchestrator.report.html import page
from orchestrator.report.reading import read_run
from orchestrator.report.text import closing_line, table
from orchestrator.schema import schema_text


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 2 where a record cannot be read or a page not be written."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.schema:
            sys.stdout.write(schema_text())
            return 0
        if not arguments.runs:
            raise UserError("give the folder of a run; --help shows what there is")
        records = [record for given in arguments.runs for record in _records(given)]
        if arguments.html:
            _write(arguments.html, page(records))
        sys.stdout.write(_shown(records, arguments) + "\n")
        sys.stdout.flush()
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except BrokenPipeError:
        # The reader has seen enough (`| head`).
        leave_unread(sys.stdout)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m orchestrator.report", description="Show the record of a run, or compare the records of several."
    )
    parser.add_argument(
        "runs", nargs="*", type=Path, metavar="RUN_DIR", help="a run's folder, its run.json, or a folder of run folders"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page of HTML")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the record as JSON; of several, a list")
    form.add_argument("--csv", action="store_true", help="print a line of comma-separated values a run")
    form.add_argument("--md", action="store_true", help="print a table of Markdown, a line a run")
    form.add_argument("--schema", action="store_true", help="print the JSON Schema of run.json and stop")
    return parser


def _records(path: Path) -> list[RunRecord]:
    """Of a run; or of the runs in a folder, where one that cannot be read does not hide the others."""
    folders = _run_folders(path)
    if folders == [path]:
        return [read_run(path)]
    records, refused = [], []
    for each in folders:
        try:
            records.append(read_run(each))
        except UserError as error:
            refused.append(error)
    if not records:
        raise refused[0]
    for one in refused:
        sys.stderr.write(f"warning: left out: {one}\n")
    return records


def _run_folders(path: Path) -> list[Path]:
    """`path` itself if it has a record, else the folders in it that have one, 2 before 10.

    Raises:
        UserError: neither.
    """
    try:
        if path.is_file() or (path / FILE_NAME).exists():
            return [path]
        if path.is_dir() and (children := _children(path)):
            return children
        near = [child.name for child in _children(path.parent)]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    what = f"the folder has no {FILE_NAME}, nor has a folder in it" if path.is_dir() else "there is no such run"
    raise UserError(f"{path}: {what}" + (f"; in {path.parent}: {near_miss(path.name, near)}" if near else ""))


def _children(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted((child for child in folder.iterdir() if (child / FILE_NAME).exists()), key=_numeric_order)


def _numeric_order(path: Path) -> list[tuple[int, str]]:
    return [(int(text), "") if text.isdecimal() else (-1, text) for text in re.split(r"(\d+)", path.name)]


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--html {path}: cannot be written: {error.strerror}") from None


def _shown(records: Sequence[RunRecord], arguments: argparse.Namespace) -> str:
    if arguments.json:
        return _json(records)
    if arguments.csv or arguments.md:
        return as_csv(records) if arguments.csv else as_markdown(records)
    return _text(records)


def _json(records: Sequence[RunRecord]) -> str:
    values = [record.model_dump(mode="json") for record in records]
    return json.dumps(values[0] if len(values) == 1 else values, indent=1)


def _text(records: Sequence[RunRecord]) -> str:
    if len(records) == 1:
        return f"{table(records[0])}\n\n{closing_line(records[0])}"
    return compare(records) + "\n\n" + "\n".join(f"{record.run_id}: {closing_line(record)}" for record in records)


if __name__ == "__main__":
    sys.exit(main())
