"""`python -m orchestrator.bench`: whole starts, repeated and timed."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from orchestrator.arguments import Parser, positive_seconds
from orchestrator.bench.against import Other
from orchestrator.bench.modes import COLD, KINDS, Mode
from orchestrator.commands import ended
from orchestrator.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """The exit code: 0; 1 where something that was started failed; 2 where the command cannot work."""
    arguments = _parser().parse_intermixed_args(argv)
    return ended(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    modes = [Mode.of(name) for name in dict.fromkeys(arguments.modes.split(","))]
    other = _other(arguments)
    out: Path | None = arguments.out
    if out is not None and (out.is_dir() or not os.access(out.parent, os.W_OK)):
        raise ConfigError.of("--out", "no file can be written there; give one in a folder that exists", out)

    from orchestrator.bench.measure import Job, measure
    from orchestrator.bench.results import as_json, table

    job = Job(arguments.overrides, modes, arguments.rounds, other, arguments.timeout_s)
    measured = measure(job, _say)
    everything = as_json(job, measured, records=arguments.records)
    sys.stdout.write((json.dumps(everything, indent=1) if arguments.json else table(job, measured)) + "\n")
    if out is not None:
        out.write_text(json.dumps(everything, indent=1) + "\n")
    return 0


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _other(arguments: argparse.Namespace) -> Other | None:
    if (arguments.against is None) != (not arguments.mark):
        raise ConfigError.of("--against", "goes with --mark NAME=PATTERN, which says what to look for in its log")
    if arguments.against is None:
        return None
    marks = {}
    for mark in arguments.mark:
        name, _, pattern = mark.partition("=")
        if name in marks:
            raise ConfigError.of("--mark", f"{name} is given twice; give each pattern a name of its own", mark)
        try:
            marks[name] = re.compile(pattern)
        except re.error as error:
            raise ConfigError.of("--mark", f"not a regular expression ({error})", mark) from None
        if not name or not pattern:
            raise ConfigError.of("--mark", "write NAME=PATTERN, such as 'ready=startup complete'", mark)
    return Other(arguments.against, marks)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a number of 1 or more")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    kinds = "\n".join(f"  {name:<10} {what}" for name, what in KINDS.items())
    parser = Parser(
        prog="python -m orchestrator.bench",
        description="Whole starts in new processes, a round of every mode after the other, with a bare import of torch "
        "and the model's class in each round. Needs a machine that does nothing else.",
        epilog=f"modes:\n{kinds}\nEach also with {COLD} at its end: the weights' files are dropped from the page cache "
        "before.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*", help="as on the command line of orchestrator")
    parser.add_argument("-n", "--rounds", type=_count, default=5, help="how many (default: 5)")
    parser.add_argument(
        "--modes",
        default="first,second",
        metavar="MODE,...",
        help="in this order in every round (default: %(default)s)",
    )
    parser.add_argument("--against", metavar="COMMAND", help="another engine's start, by the shell, in every round")
    parser.add_argument(
        "--mark", action="append", metavar="NAME=PATTERN", help="a line of its log that is waited for; may be repeated"
    )
    parser.add_argument(
        "--timeout-s",
        type=positive_seconds,
        default=900.0,
        metavar="SECONDS",
        help="for each process (default: %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON there, whatever is printed")
    parser.add_argument("--records", action="store_true", help="keep each start's whole record in the JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
