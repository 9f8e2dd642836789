"""Run what needs a CUDA device, and leave a small record of each case.

    python -m tests.gpu.run [--out FOLDER] [--list] [CASE ...]

A case is a start through the command line, whose `run.json` becomes the record, or a program that prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu.sources import RECORDS, ROOT, sources_hash

_DROPPED = ("config", "imports", "run_id")
"""Of a run's record: what is long and can be had again from the command."""


@dataclass(frozen=True)
class Case:
    """`program` is a module that prints JSON; without one, `arguments` are overrides of a start."""

    name: str
    arguments: tuple[str, ...] = ()
    program: str | None = None
    timeout_s: int = 300

    def command(self, folder: Path) -> list[str]:
        if self.program is not None:
            return [sys.executable, "-m", self.program, *self.arguments]
        return [sys.executable, "-m", "orchestrator", "device=cuda", *self.arguments, f"run.dir={folder}"]

    def shown(self) -> str:
        """The command as a person would type it."""
        if self.program is not None:
            return " ".join(["python -m", self.program, *self.arguments])
        return " ".join(["python -m orchestrator", *self.arguments])


_BIG = ("model.load_format=dummy", "gpu.util=0.9", "stages.verify.num_requests=32", "stages.verify.max_tokens=32")
_FLAGSHIP = ("model=internvl2_5_8b", "model.load_format=dummy", "gpu.util=0.99", "scheduler.max_model_len=32768")
_MEDIA = ("mm.limit_per_prompt={image: 4, video: 1}", "mm.video.max_frames=64", "mm.video.max_size=[640,360]")

CASES = (
    Case("attention", program="tests.gpu.attention"),
    Case("tiny_internvl"),
    Case("tiny_internvl_estimate", ("graphs.mode=estimate",)),
    Case("internvl2_5_8b", ("model=internvl2_5_8b", *_BIG)),
    Case("qwen2_5_vl_3b", ("model=qwen2_5_vl_3b", *_BIG)),
    Case("flagship_stress", (*_FLAGSHIP, "scheduler.max_num_batched_tokens=8192", "stages.verify.mode=stress")),
    Case("flagship_16k", (*_FLAGSHIP, "scheduler.max_num_batched_tokens=16384")),
    Case("qwen2_5_vl_3b_media", ("model=qwen2_5_vl_3b", "model.load_format=dummy", "gpu.util=0.99", *_MEDIA)),
    Case("weights", program="tests.benchmarks.load_weights"),
    Case("weights_starts", program="tests.gpu.weights_starts", timeout_s=400),
    Case("original_layout", program="tests.gpu.original_layout"),
    Case("sweep", program="tests.gpu.sweep"),
    Case("encoder_budget", program="tests.gpu.encoder_budget"),
    Case(
        "rerun",
        (*_FLAGSHIP, "scheduler.max_num_batched_tokens=8192", "startup_plan=off"),
        program="tests.gpu.rerun",
        timeout_s=400,
    ),
    Case("startup_plan", (*_FLAGSHIP, "scheduler.max_num_batched_tokens=8192"), program="tests.gpu.startup_plan"),
    Case("imports", ("-n", "3", "model=internvl2_5_8b", *_BIG), program="tests.gpu.imports"),
    Case("media", program="tests.gpu.media"),
    Case("throughput", program="tests.gpu.throughput"),
    Case("attention_table", program="tests.gpu.attention_table"),
    Case("step_profile", program="tests.gpu.step_profile"),
    Case("tune", program="tests.gpu.tune"),
    Case("serve_profile", program="tests.gpu.serve_profile"),
    Case("promises_opt_125m", ("opt_125m",), program="tests.gpu.promises"),
    Case("promises_internvl2_5_8b", ("internvl2_5_8b", "--quick"), program="tests.gpu.promises"),
    Case("engines_internvl2_5_8b", ("internvl2_5_8b", "--parts", "several,unlisted"), "tests.gpu.promises"),
    Case("neighbours_opt_125m", ("opt_125m",), program="tests.gpu.neighbours"),
    Case("neighbours_internvl2_5_8b", ("internvl2_5_8b",), program="tests.gpu.neighbours"),
    Case(
        "starts_internvl2_5_8b",
        ("1", "second,zygote", "model=internvl2_5_8b", "model.load_format=dummy", "gpu.util=0.99"),
        program="tests.gpu.starts",
        timeout_s=500,
    ),
    Case("overlap_internvl2_5_8b", ("/tmp/internvl2_5_8b",), program="tests.gpu.overlap", timeout_s=500),
)


def run_case(case: Case, out: Path) -> bool:
    """Run a case and write its record; whether it succeeded."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        # As on a machine where people work: modules find the bytecode of an earlier start.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        start = time.perf_counter()
        done = subprocess.run(
            case.command(folder),
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=case.timeout_s,
            check=False,
        )
        seconds = time.perf_counter() - start
        result = _result(case, folder, done.stdout)
    record = {
        "name": case.name,
        "command": case.shown(),
        "sources": sources_hash(),
        "exit_code": done.returncode,
        "process_s": round(seconds, 3),
        "result": result,
    }
    (out / f"{case.name}.json").write_text(json.dumps(record, indent=1) + "\n")
    tail = "" if done.returncode == 0 else "\n" + (done.stderr or done.stdout)[-2000:]
    print(f"{case.name:<24} exit {done.returncode} after {seconds:6.1f} s{tail}", flush=True)
    return done.returncode == 0


def _result(case: Case, folder: Path, output: str) -> Any:
    if case.program is not None:
        lines = output.strip().splitlines()
        return json.loads(lines[-1]) if lines and lines[-1].startswith(("{", "[")) else None
    path = folder / "run.json"
    if not path.is_file():
        return None
    return {key: value for key, value in json.loads(path.read_text()).items() if key not in _DROPPED}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.run", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="names; all of them by default")
    parser.add_argument("--out", type=Path, default=RECORDS)
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(f"{case.name:<24} {case.shown()}" for case in CASES))
        return 0
    unknown = set(arguments.cases) - {case.name for case in CASES}
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    chosen = [case for case in CASES if not arguments.cases or case.name in arguments.cases]
    succeeded = [run_case(case, arguments.out) for case in chosen]
    return 0 if all(succeeded) else 1


if __name__ == "__main__":
    sys.exit(main())
