"""Whole starts for tests: the command line in another process or in this one, and overrides that make a start quick."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from orchestrator.records import RunRecord, read_record

ROOT = Path(__file__).resolve().parent.parent

SMALL = (
    "device=cpu",
    "scheduler.max_model_len=256",
    "scheduler.max_num_batched_tokens=256",
    "scheduler.max_num_seqs=4",
    "mm.processor_kwargs={max_patches: 1}",
)
"""One tile an image, few tokens, on the CPU."""

FEW_TOKENS = "stages.verify.max_tokens=3"
"""For pipelines that verify."""

BUILT_IN = (
    "load_weights",
    "dummy_data",
    "profile_run",
    "graph_capture",
    "clear_caches",
    "allocate_kv",
    "verify",
)

NO_BUILT_IN = ("device=cpu", "engine.name=tests.planted:NoImports", *(f"~stage@stages.{slot}" for slot in BUILT_IN))
"""A pipeline of the test's own stages, which needs no model."""


def own(slot: str, name: str) -> str:
    """The override that appends a stage of `tests.planted`."""
    return f"+stages.{slot}.use=tests.planted:{name}"


def environment() -> dict[str, str]:
    """This process's, with the project first on the path and what was there before after it."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}


def command_line(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """`python -m orchestrator` in another process, under way."""
    return subprocess.Popen(
        [sys.executable, "-m", "orchestrator", *arguments],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_folders(folder: Path) -> Sequence[Path]:
    """Where the runs of that working folder left their records."""
    return sorted(path for path in (folder / "runs").iterdir() if path.is_dir())


def only_record(folder: Path) -> RunRecord:
    (run,) = run_folders(folder)
    return read_record(run)


def statuses(record: RunRecord) -> list[str]:
    return [stage.status for stage in record.stages]
