"""`python -m orchestrator.cache`: list what the disk cache holds, verify that it is whole, prune it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from orchestrator.cache.contents import Contents, Stored
from orchestrator.cache.folder import usual_folder
from orchestrator.cache.store import Cache
from orchestrator.errors import UserError
from orchestrator.units import format_size, parse_size

_DAY_S = 24 * 60 * 60
_KEY_LETTERS = 12


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0; 1 where `verify` finds a spoilt entry or `prune` cannot remove one; 2 where no cache can be
    read."""
    arguments = _parser().parse_args(argv)
    try:
        folder = Path(os.path.abspath(Path(arguments.dir).expanduser()))  # noqa: PTH100 - as the cache itself does
        if not folder.is_dir():
            raise UserError(f"there is no cache in {folder}; --dir names another folder")
        code, shown, text = arguments.run(folder, arguments)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    sys.stdout.write((json.dumps(shown, indent=1) if arguments.json else text) + "\n")
    return int(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m orchestrator.cache",
        description="The disk cache: dummy data and what else starts keep for later ones. Models that the project "
        "makes lie in the same folder and are not touched.",
    )
    common = argparse.ArgumentParser(add_help=False)
    default = usual_folder(os.environ)
    common.add_argument("--dir", default=default, metavar="FOLDER", help=f"cache.dir of the starts; here {default}")
    common.add_argument("--json", action="store_true", help="print JSON")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    listed = commands.add_parser("list", parents=[common], help="the entries, oldest first")
    listed.set_defaults(run=_list)
    verified = commands.add_parser("verify", parents=[common], help="read everything and name what is spoilt")
    verified.set_defaults(run=_verify)
    pruned = commands.add_parser("prune", parents=[common], help="remove entries; without options, the spoilt ones")
    pruned.add_argument("--max-bytes", type=_size, metavar="SIZE", help="the oldest go until so much is left: 500MiB")
    pruned.add_argument("--older-than", type=float, metavar="DAYS", help="entries stored more than so many days ago")
    pruned.add_argument("--all", action="store_true", help="every entry")
    pruned.set_defaults(run=_prune)
    return parser


def _size(text: str) -> int:
    try:
        return parse_size(int(text) if text.isdecimal() else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _list(folder: Path, arguments: argparse.Namespace) -> tuple[int, Any, str]:
    entries = Contents(folder).entries()
    return 0, [vars(each) for each in entries], "\n".join([*map(_line, entries), _total(entries, folder)])


def _verify(folder: Path, arguments: argparse.Namespace) -> tuple[int, Any, str]:
    contents = Contents(folder)
    faults, entries = contents.faults(), contents.entries()
    lines = [f"{key[:_KEY_LETTERS]}  spoilt: {fault}" for key, fault in faults.items()]
    lines.append(f"{len(entries) - len(faults)} of {len(entries)} entries are whole")
    shown = {"entries": len(entries), "spoilt": faults}
    return 1 if faults else 0, shown, "\n".join(lines)


def _prune(folder: Path, arguments: argparse.Namespace) -> tuple[int, Any, str]:
    contents = Contents(folder)
    entries = contents.entries()
    faults = contents.faults() if not arguments.all else {}
    chosen = [each for each in entries if _goes(each, faults, arguments)]
    kept = sum(each.bytes for each in entries if each not in chosen)
    for each in entries:
        if arguments.max_bytes is not None and kept > arguments.max_bytes and each not in chosen:
            chosen.append(each)
            kept -= each.bytes
    warnings: list[str] = []
    with Cache(folder, max_bytes=sys.maxsize, warn=warnings.append) as cache:
        removed = [each for each in chosen if cache.delete(each.key)]
    lines = [*map(_line, removed), *warnings, f"removed {len(removed)} of {len(entries)} entries"]
    shown = {"removed": [vars(each) for each in removed], "kept": len(entries) - len(removed), "warnings": warnings}
    return 1 if warnings else 0, shown, "\n".join(lines)


def _goes(stored: Stored, faults: dict[str, str], arguments: argparse.Namespace) -> bool:
    days = arguments.older_than
    too_old = days is not None and time.time() - stored.stored_at > days * _DAY_S
    return arguments.all or too_old or stored.key in faults


def _line(stored: Stored) -> str:
    when = datetime.fromtimestamp(stored.stored_at).strftime("%Y-%m-%d %H:%M")
    about = " ".join(_words(value) for value in stored.about.values())
    return f"{stored.key[:_KEY_LETTERS]}  {when}  {format_size(stored.bytes):>10}  {about}".rstrip()


def _words(value: Any) -> str:
    return " x ".join(map(str, value)) if isinstance(value, list) else str(value)


def _total(entries: Sequence[Stored], folder: Path) -> str:
    return f"{len(entries)} entries, {format_size(sum(each.bytes for each in entries))} in {folder}"


if __name__ == "__main__":
    sys.exit(main())
