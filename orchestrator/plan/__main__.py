"""`python -m orchestrator.plan`: what fits on which card, the largest value that fits, the same for other engines."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from orchestrator.commands import told
from orchestrator.errors import OrchestratorError
from orchestrator.plan import export, fit, solve
from orchestrator.plan.cards import chosen_card, without_card
from orchestrator.plan.engines import ENGINES
from orchestrator.plan.planner import Planner
from orchestrator.planning import plan
from orchestrator.registry import Registry

_ABOUT = (
    "OVERRIDES are those of a start, such as model=internvl2_5_8b gpu=h200 gpu.util=0.9. Nothing is loaded, and no GPU "
    "is touched."
)
_EXIT_CODES = "Exit codes: 0; 1 where nothing of a table fits, or a plan fails; 2 where the overrides cannot work."


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = _parser()
    arguments, more = parser.parse_known_args(argv)
    if unknown := [text for text in more if text.startswith("-")]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    # argparse takes the overrides before the first option alone.
    arguments.overrides += more
    try:
        code, shown, text = arguments.run(arguments)
    except OrchestratorError as error:
        return told(error)
    sys.stdout.write((json.dumps(shown, indent=1) if arguments.json else text) + "\n")
    return int(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m orchestrator.plan", description=f"Plan without a GPU. {_ABOUT}", epilog=_EXIT_CODES
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    fits = commands.add_parser("fit", help="a table over cards and shares", description=_ABOUT)
    _common(fits)
    fits.add_argument("--gpus", type=_names, metavar="CARD,...", help="options of the group gpu; default: gpu=, or all")
    fits.add_argument("--utils", type=_shares, default=(), metavar="UTIL,...", help="default: gpu.util")
    fits.set_defaults(run=_fit)

    what = ", ".join(solve.FIELDS)
    solves = commands.add_parser(
        "solve", help=f"the largest {what} that fits (of gpu.util the smallest)", description=_ABOUT
    )
    solves.add_argument("what", choices=tuple(solve.FIELDS))
    _common(solves)
    solves.set_defaults(run=_solve)

    exports = commands.add_parser("export", help=f"the command of {', '.join(ENGINES)}", description=_ABOUT)
    exports.add_argument("engine", choices=tuple(ENGINES))
    _common(exports)
    exports.set_defaults(run=_export)
    return parser


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDES", help="key=value and group=file, as for a start")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _shares(text: str) -> list[float]:
    return [_share(part) for part in _names(text)]


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share: it must be a number above 0 and at most 1")
    return share


def _fit(arguments: argparse.Namespace) -> tuple[int, Any, str]:
    planner, card = _planner(arguments)
    cards = arguments.gpus or ([card] if card else planner.cards)
    found = list(fit.lines(planner, [chosen_card(each, planner.cards) for each in cards], arguments.utils))
    return 0 if any(line.fit.fits for line in found) else 1, [fit.as_json(line) for line in found], fit.table(found)


def _solve(arguments: argparse.Namespace) -> tuple[int, Any, str]:
    planner, given = _planner(arguments)
    card = chosen_card(given, planner.cards)
    solution = solve.Solver(planner, card).solve(arguments.what)
    return 0, vars(solution), solve.as_text(solution, card)


def _export(arguments: argparse.Namespace) -> tuple[int, Any, str]:
    planner, given = _planner(arguments)
    exported = export.export(planner, chosen_card(given, planner.cards), arguments.engine)
    return 0, export.as_json(exported), export.as_text(exported)


def _planner(arguments: argparse.Namespace) -> tuple[Planner, str | None]:
    """Of the overrides, and the card that they choose."""
    overrides, card = without_card(arguments.overrides)
    registry = Registry.discover()
    return Planner(overrides, registry, lambda each: plan(each, registry=registry)), card


if __name__ == "__main__":
    sys.exit(main())
