"""Whole starts with everything that may run beside other work, with nothing of it, and without each; in turn.

    python -m tests.benchmarks.overlap [-n 5] [--cold] [--json] [-- OVERRIDES...]

Every start is a new process. `--cold` drops the weights' files of `model.path` from the page cache before each. Prints
minima and medians of the intervals that an overlap can change, and of the processor time; and, for each overlap, how
much longer a start takes without it. Imports vary by more than most overlaps gain, so look at `after imports`, which
ends with the dummy data, and at `but imports`, which is the whole start, for what later stages gain (`kernels`, on a
GPU); but `link torch` and `open device` run beside the imports.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from orchestrator.bench.page_cache import drop
from orchestrator.bench.processes import Place, timed
from orchestrator.tensorfile import find_weight_files

NAMES = ("read ahead", "link torch", "open device", "processor", "dummy data", "kernels")
VARIANTS = {"all": (), **{f"without {name}": (name,) for name in NAMES}, "none": NAMES}
START = """
import sys
from orchestrator.clock import Clock
clock = Clock.since_process_start()
from orchestrator.beside import Beside
from orchestrator.compose import compose
from orchestrator.events import TextEvents
from orchestrator.registry import Registry
from orchestrator.signals import interruptible
with interruptible():
    registry = Registry.discover()
    config = compose(sys.argv[2:], registry=registry).config
    from orchestrator import app
    beside = Beside(clock, sys.argv[1].split(","))
    outcome = app.run(
        config, overrides=sys.argv[2:], events=TextEvents(), clock=clock, registry=registry, beside=beside
    )
    outcome.cleanup.close()
sys.exit(outcome.exit_code)
"""


def start(without: Sequence[str], overrides: Sequence[str], folder: Path) -> dict[str, float]:
    """Seconds of one start."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", START, ",".join(without), *overrides, f"run.dir={folder / 'run'}"]
    seconds = timed(command, Place(dict(os.environ), Path.cwd(), 300.0), folder / "log")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    record = json.loads((folder / "run" / "run.json").read_text())
    found = {span["name"]: span["wall_s"] for span in record["spans"] if span["beside"] is None}
    found |= {stage["slot"]: stage["wall_s"] for stage in record["stages"] if stage["start_s"] is not None}
    chosen = {name: found.get(name, 0.0) for name in ("imports", "device", "load_weights", "dummy_data")}
    return {
        **chosen,
        "after imports": sum(chosen.values()) - chosen["imports"],
        "but imports": record["total_s"] - found.get("imports", 0.0),
        "total": record["total_s"],
        "process": seconds,
        "processor time": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    }


def measure(
    count: int, variants: Sequence[str], overrides: Sequence[str], files: Sequence[Path]
) -> dict[str, list[dict[str, float]]]:
    """Variant -> one start a round; one more start comes first and is not counted."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(count + 1):
            for name in variants if number else ["all"]:
                folder = Path(scratch) / f"{number} {name}"
                folder.mkdir()
                drop(files)
                seconds = start(VARIANTS[name], overrides, folder)
                if number:
                    found[name].append(seconds)
    return found


def summary(found: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Variant -> row -> minimum and median."""
    return {
        name: {
            row: {"min": min(each[row] for each in starts), "median": median(each[row] for each in starts)}
            for row in starts[0]
        }
        for name, starts in found.items()
    }


def table(rows: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    columns = list(next(iter(rows.values())))
    lines = ["min / median s".ljust(22) + "".join(f"{column:>18}" for column in columns)]
    for name, row in rows.items():
        lines.append(f"{name:<22}" + "".join(f"{row[each]['min']:9.3f} {row[each]['median']:8.3f}" for each in columns))
    for name, row in rows.items():
        if name != "all" and "all" in rows:
            more = {
                each: row[each]["median"] - rows["all"][each]["median"] for each in ("after imports", "but imports")
            }
            lines.append(f"{name}: " + ", ".join(f"{each} {seconds:+.3f} s" for each, seconds in more.items()))
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.overlap", description=__doc__)
    parser.add_argument("-n", type=int, default=5, help="starts of each variant (default: 5)")
    parser.add_argument("--cold", action="store_true", help="with the weights' files out of the page cache")
    parser.add_argument(
        "--variants", default=",".join(VARIANTS), help="which, with commas between (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args(argv)
    paths = [Path(each.partition("=")[2]) for each in arguments.overrides if each.startswith("model.path=")]
    files = find_weight_files(paths[0]) if arguments.cold else ()
    rows = summary(measure(arguments.n, arguments.variants.split(","), arguments.overrides, files))
    print(json.dumps(rows) if arguments.json else table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
