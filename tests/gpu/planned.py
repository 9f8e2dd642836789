"""Measure the points that were predicted, on a CUDA device.

    python -m tests.gpu.planned [--out FOLDER] [--limit SECONDS] [MODEL ...]

A process a model imports what starts import, and makes a child of itself for each point, so that every point is the
first start of its process, with a context of its own, and none imports anything again. What was measured is written
after each point.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from tests.gpu.points import MEASURED, MODELS, TEXT_MODELS, Point, facts, points_of, write
from tests.gpu.sources import ROOT

_POINT_S = 90.0
"""After which a point is given up."""
_OF_FORKING = ("forked subprocess", "initialization error")
"""What CUDA says to a child whose parent had touched it after all."""
_ALONE = """
import json, sys
from pathlib import Path
from tests.gpu.planned import run
from tests.gpu.points import points_of
model, name, device, folder = sys.argv[1:]
point = next(point for point in points_of(model) if point.name == name)
Path(folder, "answer.json").write_text(json.dumps(run(point, device, Path(folder, "run"))))
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.planned", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="names; by default those that the goals name")
    parser.add_argument("--out", type=Path, default=MEASURED)
    parser.add_argument("--limit", type=float, default=540.0, metavar="SECONDS", help="start no point after so many")
    parser.add_argument("--inside", action="store_true", help="this process measures the one model that is given")
    arguments = parser.parse_args()
    if unknown := set(arguments.models) - {*MODELS, *TEXT_MODELS}:
        parser.error(f"no points of {', '.join(sorted(unknown))}; there are {', '.join((*MODELS, *TEXT_MODELS))}")
    end = time.monotonic() + arguments.limit
    chosen = arguments.models or MODELS
    if arguments.inside:
        return int(not all(measure(model, arguments.out, end) for model in chosen))
    codes = [_process(model, arguments.out, end - time.monotonic()) for model in chosen if time.monotonic() < end]
    return max(codes, default=1)


def _process(model: str, out: Path, seconds: float) -> int:
    command = [sys.executable, "-m", "tests.gpu.planned", "--inside", "--out", str(out), "--limit", str(seconds), model]
    # Otherwise torch asks the driver itself whether there is a device, after which no child could use it.
    environment = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def measure(model: str, out: Path, end: float) -> bool:
    """Measure the points of a model; whether each succeeded."""
    import_all(model)
    found: dict[str, dict[str, Any]] = {}
    for point in points_of(model):
        if time.monotonic() > end:
            found[point.name] = {"status": "not run", "error": "no time was left"}
            continue
        start = time.monotonic()
        result = in_child(point)
        if any(words in str(result.get("error")) for words in _OF_FORKING):
            result = alone(point)
        found[point.name] = result
        found[point.name]["seconds"] = round(time.monotonic() - start, 3)
        write(out, model, found)
        blocks = (result.get("kv_cache") or {}).get("num_gpu_blocks")
        said = f"{blocks} blocks" if blocks is not None else str(result.get("error"))[-600:]
        print(f"{model:<20} {point.name:>3}  {result['status']:<8} {result['seconds']:6.1f} s  {said}", flush=True)
    write(out, model, found)
    return all(result["status"] == "ok" for result in found.values())


def import_all(model: str) -> None:
    """What starts of a model import, in the parent, which never touches a device: the child of one that did could not
    use it."""
    import torch  # noqa: F401
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from orchestrator.engine import models, transformers  # noqa: F401

    path = Path(models.__file__).parent / "configs" / f"{model}.json"
    if not path.is_file():
        return
    values = json.loads(path.read_text())
    config = AutoConfig.for_model(values["model_type"])
    for auto in (AutoModelForImageTextToText, AutoModelForCausalLM):
        if type(config) in auto._model_mapping:
            auto._model_mapping[type(config)]
            return


def in_child(point: Point, device: str = "cuda") -> dict[str, Any]:
    """What a child of this process measures; what went wrong if it did not."""
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "answer.json"
        child = os.fork()
        if child == 0:
            _as_child(point, device, Path(scratch), answer)
        ended = _wait(child, _POINT_S)
        if answer.is_file():
            result: dict[str, Any] = json.loads(answer.read_text())
            return result
    return {"status": "failed", "error": f"the child ended with {ended} and left nothing"}


def alone(point: Point, device: str = "cuda") -> dict[str, Any]:
    """The same in a process that imports everything itself."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-c", _ALONE, point.model, point.name, device, scratch]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_POINT_S, check=False)
        except subprocess.TimeoutExpired:
            return {"status": "failed", "error": f"no end after {_POINT_S:g} s"}
        answer = Path(scratch) / "answer.json"
        if answer.is_file():
            result: dict[str, Any] = json.loads(answer.read_text())
            return result
    return {"status": "failed", "error": done.stderr[-2000:]}


def _as_child(point: Point, device: str, scratch: Path, answer: Path) -> None:
    """Never returns: the parent's cleanup is not the child's."""
    code = 1
    try:
        result = run(point, device, scratch / "run")
        partial = scratch / "answer.partial"
        partial.write_text(json.dumps(result))
        partial.rename(answer)
        code = 0
    except BaseException:
        answer.write_text(json.dumps({"status": "failed", "error": traceback.format_exc()[-2000:]}))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(point: Point, device: str, folder: Path) -> dict[str, Any]:
    """One start."""
    from orchestrator import start
    from orchestrator.starting import StartError

    try:
        with start([f"device={device}", *point.overrides, f"run.dir={folder}"]) as started:
            return facts(started.record)
    except StartError as error:
        return facts(error.record)


def _wait(child: int, seconds: float) -> str:
    """How a child ended; it is ended where it takes longer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return f"exit code {os.waitstatus_to_exitcode(status)}"
        time.sleep(0.02)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return f"no end after {seconds:g} s"


if __name__ == "__main__":
    sys.exit(main())
