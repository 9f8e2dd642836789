"""Whole starts on a checkpoint of the real size, by loader and by where the files are; prints one JSON line.

    python -m tests.gpu.weights_starts [--model NAME] [--layers N] [--disk FOLDER] [--memory FOLDER] [OVERRIDE ...]

The first start is not counted: it fills the caches of dummy data and kernels.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.host_copy import evict, warm
from tests.gpu.sources import ROOT
from tests.gpu.write_checkpoint import write_checkpoint
from tests.starts import environment

_METRICS = ("read_s", "bytes_per_s", "peak_bytes", "bytes", "read_ahead")


def start(folder: Path, *overrides: str) -> dict[str, Any]:
    """One start in a process of its own: seconds of the process, to ready, in all and by stage."""
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        command = [sys.executable, "-m", "orchestrator", "model=auto", f"model.path={folder}", f"run.dir={run}"]
        begin = time.monotonic()
        done = subprocess.run(
            [*command, *overrides], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
        )
        seconds = time.monotonic() - begin
        if done.returncode != 0:
            return {"exit_code": done.returncode, "output": (done.stderr or done.stdout)[-1000:]}
        record = json.loads((run / "run.json").read_text())
    return {
        "process_s": round(seconds, 3),
        "import_s": record["import_s"],
        "ready_s": record["ready_s"],
        "total_s": record["total_s"],
        "stages": {stage["slot"]: stage["wall_s"] for stage in record["stages"]},
        "load_weights": {name: record["stages"][0]["metrics"].get(name) for name in _METRICS},
    }


def measure(memory: Path, disk: Path, overrides: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def note(name: str, folder: Path, *more: str) -> None:
        found[name] = start(folder, *overrides, *more)
        print(name, found[name], file=sys.stderr, flush=True)

    files = sorted(disk.glob("*.safetensors"))
    note("first, not counted", memory)
    note("safetensors, tmpfs", memory)
    warm(files)
    note("safetensors, page cache", disk)
    note("transformers, tmpfs", memory, "weights.loader=transformers")
    evict(files)
    note("safetensors, cold disk", disk)
    evict(files)
    note("safetensors, cold disk, direct", disk, "weights.io=direct")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.weights_starts", description=__doc__)
    parser.add_argument("--model", default="internvl2_5_8b")
    parser.add_argument("--layers", type=int, help="of the language model, for a smaller one")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="a folder on a disk")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a folder in tmpfs")
    parser.add_argument("overrides", nargs="*", default=["gpu.util=0.9"])
    arguments = parser.parse_args()
    places = [Path(tempfile.mkdtemp(prefix="weights-", dir=parent)) for parent in (arguments.memory, arguments.disk)]
    try:
        for place in places:
            write_checkpoint(arguments.model, place, layers=arguments.layers)
        print(json.dumps(measure(places[0], places[1], arguments.overrides)))
    finally:
        for place in places:
            shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
