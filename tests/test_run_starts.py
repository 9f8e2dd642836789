"""The benchmark of whole starts, run once on the embedded model from another folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.starts import ROOT, SMALL

SCRIPT = ROOT / "tests" / "benchmarks" / "run_starts.py"


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_run_of_one(tmp_path: Path) -> None:
    done = bench(tmp_path, "-n", "1", "--json", "out.json", "--", *SMALL, "pipeline=profile_only")
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["modes"]["profiled"]["records"][0]["status"] == "ok"
    assert data["bare_import"]["median"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_a_configuration_that_cannot_work_ends_it(tmp_path: Path) -> None:
    done = bench(tmp_path, "-n", "1", "--", "kv.block_size=0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: kv.block_size=0")
