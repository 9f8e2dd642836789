"""The benchmark of whole starts, run once on the embedded model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.run_starts import Runs, Start, series, table
from tests.test_cli import ROOT, environment

SCRIPT = ROOT / "tests" / "benchmarks" / "run_starts.py"
OVERRIDES = ["device=cpu", "stages.verify.num_requests=1", "stages.verify.max_tokens=2"]


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)


def made_up(total: float, stage: float) -> Start:
    record: dict[str, Any] = {
        "spans": [
            {"name": "imports", "start_s": 0, "wall_s": total - stage, "beside": None},
            {"name": "warm-up", "start_s": 0, "wall_s": 9.0, "beside": "load_weights"},
        ],
        "stages": [{"slot": "load_weights", "wall_s": stage}, {"slot": "verify", "wall_s": None}],
        "ready_s": None,
        "total_s": total,
    }
    return Start(total + 0.5, record)


def test_a_run_of_one(tmp_path: Path) -> None:
    done = bench(tmp_path, "-n", "1", "--json", "out.json", "--", *OVERRIDES)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 starts: device=cpu")
    names = [line.split("  ")[0] for line in done.stdout.splitlines()]
    for name in (
        "imports",
        "load_weights",
        "verify",
        "ready",
        "total",
        "process",
        "bare import",
        "process / bare import",
    ):
        assert name in names
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["overrides"] == OVERRIDES
    assert data["versions"]["torch"] and data["device"]["host"]["cores"]
    assert len(data["starts"]) == len(data["bare_s"]) == 1
    assert data["starts"][0]["record"]["status"] == "ok"
    summary = data["summary"]
    assert summary["process"]["median"] >= summary["total"]["median"] > summary["verify"]["median"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_a_start_that_fails_is_shown_and_ends_the_benchmark(tmp_path: Path) -> None:
    done = bench(tmp_path, "-n", "1", "--", "kv.block_size=0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: kv.block_size=0")


@pytest.mark.parametrize("arguments", [("-n", "0"), ("-n", "x")])
def test_a_wrong_count_is_refused(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    assert bench(tmp_path, *arguments).returncode == 2


def test_the_rows_are_medians_and_ranges_of_all_starts() -> None:
    runs = Runs([], [made_up(5.0, 1.0), made_up(7.0, 2.0), made_up(6.0, 3.0)], [4.0, 4.0, 4.0])
    rows = series(runs)
    assert rows["load_weights"] == [1.0, 2.0, 3.0]
    assert rows["imports"] == [4.0, 5.0, 3.0]
    assert rows["process above bare import"] == [1.5, 3.5, 2.5]
    assert "warm-up" not in rows
    text = table(runs)
    assert "load_weights                   2.000      1.000 ..     3.000" in text
    assert text.endswith("1.62")
    assert "ready" not in text
