"""`python -m orchestrator.rerun RUN_DIR`: repeat a recorded run."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from orchestrator.clock import Clock
from orchestrator.commands import ended
from orchestrator.events import Events, SilentEvents, TextEvents

_DESCRIPTION = """Repeat a recorded run from its resolved configuration. Says before it starts what differs between then
and now (versions, driver, sources, environment variables, model files), and afterwards what differs in the results
(blocks, accounts, dummy data, tokens) and by how much it was faster or slower."""
_EPILOG = """Exit codes: 0 the results are the same; 1 the start failed, or the results differ; 2 the record cannot be
repeated, or what it asks for cannot work here; 130 and 143 interrupted."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    return ended(lambda: _repeat(arguments, Clock.since_process_start()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.rerun", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="a run's folder, or its run.json")
    parser.add_argument("--dir", type=Path, metavar="FOLDER", help="of the new record; else a new one under runs/")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def _repeat(arguments: argparse.Namespace, clock: Clock) -> int:
    from orchestrator.registry import Registry
    from orchestrator.report.reading import read_run
    from orchestrator.rerun.circumstances import differences, present, recorded, unknown
    from orchestrator.rerun.configuration import repeatable
    from orchestrator.rerun.results import compared, seconds
    from orchestrator.rerun.telling import Repetition, after_text, before_text

    then = read_run(arguments.run)
    registry = Registry.discover()
    again = repeatable(then, registry)
    circumstances = recorded(then)
    before = differences(circumstances, present(again.config, registry, circumstances))
    events: Events = SilentEvents() if arguments.json else TextEvents()
    events.info(before_text(then.run_id, again.notes, before, unknown(circumstances)))

    from orchestrator import app

    outcome = app.run(
        again.config, overrides=then.overrides, events=events, clock=clock, registry=registry, run_dir=arguments.dir
    )
    outcome.cleanup.close()
    now = outcome.record
    late = [each for each in differences(circumstances, recorded(now)) if each.name not in {one.name for one in before}]
    done = Repetition(
        then.run_id, now.run_id, str(outcome.folder), again.notes, before, late, compared(then, now), seconds(then, now)
    )
    if arguments.json:
        sys.stdout.write(json.dumps(done.as_json(), indent=1) + "\n")
    events.info(after_text(done))
    return outcome.exit_code or int(not done.is_same)


if __name__ == "__main__":
    exit_code = main()
    # As at the end of a start: the last collections would walk over all that was imported.
    gc.freeze()
    sys.exit(exit_code)
