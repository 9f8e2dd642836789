"""Whole starts, each in a new process, and beside each a bare import of the same modules in another.

    python tests/benchmarks/run_starts.py [-n 5] [--json FILE] [-- OVERRIDES...]

A bare import is torch, transformers and the model's class, timed as a process like a start is. One more start comes
first and is not counted: it fills the caches. Prints medians and ranges by stage; --json writes everything that the
records say. Needs a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BARE = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
config = AutoConfig.from_pretrained(sys.argv[1])
for auto in (AutoModelForImageTextToText, AutoModelForCausalLM):
    if type(config) in auto._model_mapping:
        auto._model_mapping[type(config)]
        break
"""


@dataclass(frozen=True)
class Start:
    """One start: seconds from spawning its process to its exit, and its record."""

    process_s: float
    record: dict[str, Any]


@dataclass
class Runs:
    """What was measured, in the order in which it was."""

    overrides: list[str]
    starts: list[Start] = field(default_factory=list)
    bare_s: list[float] = field(default_factory=list)


class FailedProcess(Exception):
    """A measured process that failed; its output is the message."""


def timed(command: Sequence[str], environment: Mapping[str, str]) -> float:
    """Seconds from spawning to exit.

    Raises:
        FailedProcess: it did not succeed.
    """
    begin = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - begin
    if done.returncode != 0:
        raise FailedProcess(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return seconds


def measure(overrides: Sequence[str], count: int) -> Runs:
    """`count` starts and as many bare imports, alternating, after one start that makes what later ones find."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    runs = Runs(list(overrides))
    folder = str(model_folder(overrides))
    with tempfile.TemporaryDirectory() as parent:
        for number in range(count + 1):
            place = Path(parent) / str(number)
            command = [sys.executable, "-m", "orchestrator", *overrides, f"run.dir={place}"]
            start = Start(timed(command, environment), json.loads((place / "run.json").read_text()))
            if number == 0:
                continue
            runs.starts.append(start)
            runs.bare_s.append(timed([sys.executable, "-c", BARE, folder], environment))
    return runs


def model_folder(overrides: Sequence[str]) -> Path:
    """The folder of the model that is started."""
    from orchestrator.compose import compose
    from orchestrator.model_folder import find_folder
    from orchestrator.registry import Registry

    config = compose(list(overrides)).config
    resolve = Registry.discover().resolve
    cache_dir = Path(config.cache.dir).expanduser()
    return find_folder(config.model, make=lambda name: resolve("models", name)(), cache_dir=cache_dir)


def series(runs: Runs) -> dict[str, list[float]]:
    """Row of the table -> seconds, one a start."""
    rows: dict[str, list[float]] = {}
    for start in runs.starts:
        record = start.record
        for span in record["spans"]:
            if span.get("beside") is None:
                rows.setdefault(span["name"], []).append(span["wall_s"])
        for stage in record["stages"]:
            rows.setdefault(stage["slot"], []).append(stage["wall_s"] or 0.0)
    rows["ready"] = [start.record["ready_s"] for start in runs.starts if start.record["ready_s"] is not None]
    rows["total"] = [start.record["total_s"] for start in runs.starts]
    rows["process"] = [start.process_s for start in runs.starts]
    rows["bare import"] = list(runs.bare_s)
    rows["process above bare import"] = [
        start.process_s - bare for start, bare in zip(runs.starts, runs.bare_s, strict=True)
    ]
    return rows


def table(runs: Runs) -> str:
    """Medians and ranges, and the ratio of a whole process to a bare import."""
    rows = series(runs)
    width = max(len(name) for name in rows)
    lines = [f"{len(runs.starts)} starts: {' '.join(runs.overrides) or 'the default'}"]
    lines.append(f"{'':<{width}}  {'median s':>9}  {'min':>9} .. {'max':>9}")
    for name, seconds in rows.items():
        if seconds:
            lines.append(f"{name:<{width}}  {median(seconds):9.3f}  {min(seconds):9.3f} .. {max(seconds):9.3f}")
    ratio = median(rows["process"]) / median(rows["bare import"])
    lines.append(f"{'process / bare import':<{width}}  {ratio:9.2f}")
    return "\n".join(lines)


def everything(runs: Runs) -> dict[str, Any]:
    """For --json: the rows, versions, device and host, and all records."""
    first = runs.starts[0].record
    summary = {
        name: {"median": median(seconds), "min": min(seconds), "max": max(seconds), "all": seconds}
        for name, seconds in series(runs).items()
        if seconds
    }
    return {"summary": summary, "versions": first["versions"], "device": first["device"], **asdict(runs)}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Repeat whole starts in new processes.")
    parser.add_argument("-n", type=int, default=5, metavar="STARTS", help="how many are measured (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    parser.add_argument("overrides", nargs="*", help="as on the command line of orchestrator, after --")
    arguments = parser.parse_args(argv)
    if arguments.n < 1:
        parser.error("-n must be at least 1")
    from orchestrator.errors import UserError

    try:
        runs = measure(arguments.overrides, arguments.n)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except FailedProcess as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(table(runs) + "\n")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(everything(runs), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
