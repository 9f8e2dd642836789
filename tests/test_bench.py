"""The command that repeats whole starts: real processes, the tiny model, and another engine that is a shell script."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.bench.against import Other, start_other
from orchestrator.bench.measure import Job, Measured, Start
from orchestrator.bench.modes import Mode
from orchestrator.bench.page_cache import drop
from orchestrator.bench.processes import FailedProcess, Place, timed
from orchestrator.bench.results import as_json, rows_of, table
from orchestrator.errors import ConfigError
from tests.starts import SMALL, environment

QUICK = (*SMALL, "~stage@stages.verify")
ENGINE = """
echo "loading" >&2
sleep 600 & echo "child $!"
sleep 0.1
printf 'INFO: Application startup '; sleep 0.1; echo 'complete.'
sleep 600
"""


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "orchestrator.bench", *arguments]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)


def made_up(total: float, stage: float, plan: str = "hit") -> Start:
    record: dict[str, Any] = {
        "spans": [
            {"name": "imports", "start_s": 0.0, "wall_s": total - stage, "beside": None},
            {"name": "warm-up", "start_s": 0.0, "wall_s": 9.0, "beside": "load_weights"},
        ],
        "stages": [
            {
                "slot": "load_weights",
                "start_s": total - stage,
                "wall_s": stage,
                "metrics": {"startup_plan": {"status": plan}},
            },
            {"slot": "verify", "start_s": None, "wall_s": None, "metrics": {}},
        ],
        "ready_s": None,
        "total_s": total,
        "versions": {"torch": "2"},
        "device": {"kind": "cpu"},
    }
    return Start(total + 0.5, record)


def place(folder: Path, timeout_s: float = 60.0) -> Place:
    return Place(dict(os.environ), folder, timeout_s)


def test_second_starts_and_forked_ones_beside_another_engine(tmp_path: Path) -> None:
    (tmp_path / "engine.sh").write_text(ENGINE)
    marks = ("--mark", "loading=^loading", "--mark", "ready=Application startup complete")
    done = bench(
        tmp_path,
        *("-n", "1", "--modes", "second,zygote", "--out", "out.json"),
        *("--against", "sh engine.sh", *marks, "--", *QUICK),
    )
    assert done.returncode == 0, done.stderr
    header = done.stdout.splitlines()[1]
    assert header.split("  ")[0] == "median s (range)"
    assert [title for title in ("second", "zygote", "bare import", "other") if title in header] != []
    names = [line.split("  ")[0] for line in done.stdout.splitlines()]
    for name in ("imports", "load_weights", "allocate_kv", "ready", "total", "process", "process above bare import"):
        assert name in names
    data = json.loads((tmp_path / "out.json").read_text())
    second, zygote = data["modes"]["second"], data["modes"]["zygote"]
    assert zygote["summary"]["imports"]["median"] < second["summary"]["imports"]["median"]
    assert second["beside"][0].keys() >= {"processor"}
    found = data["other"]["marks"]
    assert found["ready"]["median"] > found["loading"]["median"] > 0
    assert data["versions"]["torch"] and data["device"]["host"]["cores"]
    assert any("bytecode" in note for note in data["notes"]) == sys.dont_write_bytecode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine.sh", "out.json"]
    assert not [each for each in psutil.process_iter(["cmdline"]) if "engine.sh" in (each.info["cmdline"] or [])]


def test_the_other_engine_is_ended_with_its_children(tmp_path: Path) -> None:
    (tmp_path / "engine.sh").write_text(ENGINE)
    other = Other("sh engine.sh", {"ready": re.compile("startup complete"), "child": re.compile(r"child \d+")})
    seen = start_other(other, place(tmp_path), tmp_path / "log")
    assert seen["ready"] >= seen["child"] > 0
    child = re.search(r"child (\d+)", (tmp_path / "log").read_text())
    assert child is not None and not psutil.pid_exists(int(child[1]))


@pytest.mark.parametrize(
    ("command", "timeout_s", "message"),
    [
        ("echo no memory; exit 3", 60.0, r"ended with 3, and no line matched --mark ready=never:\nno memory"),
        ("echo waiting; sleep 600", 0.3, r"was not ready in 0\.3 s, and no line matched --mark ready=never:\nwaiting"),
    ],
)
def test_another_engine_that_does_not_get_there(tmp_path: Path, command: str, timeout_s: float, message: str) -> None:
    with pytest.raises(FailedProcess, match=message):
        start_other(Other(command, {"ready": re.compile("never")}), place(tmp_path, timeout_s), tmp_path / "log")


def test_a_mark_on_the_last_line_of_a_command_that_ends(tmp_path: Path) -> None:
    other = Other("printf ready", {"ready": re.compile("ready")})
    assert start_other(other, place(tmp_path), tmp_path / "log").keys() == {"ready"}


def test_a_measured_process_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(FailedProcess, match=r"did not end in 0\.2 s"):
        timed(["sleep", "600"], place(tmp_path, 0.2), tmp_path / "log")
    with pytest.raises(FailedProcess, match=r"ended with 7:\nwhy"):
        timed(["sh", "-c", "echo why; exit 7"], place(tmp_path), tmp_path / "log")


def test_ending_the_benchmark_ends_what_it_started(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "orchestrator.bench", "-n", "1", "--modes", "first", "--", *QUICK]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and process.stderr.readline() == "round 1: first\n"
        watched, end = psutil.Process(process.pid), time.monotonic() + 30
        while not (children := watched.children(recursive=True)) and time.monotonic() < end:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
    assert process.returncode == 143
    assert children and not any(child.is_running() for child in children)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-n", "0"), "0: must be a number of 1 or more"),
        (("--modes", "frist"), "--modes=frist: did you mean first?"),
        (("--against", "true"), "--against: goes with --mark NAME=PATTERN"),
        (("--against", "true", "--mark", "ready"), "--mark=ready: write NAME=PATTERN"),
        (("--against", "true", "--mark", "ready=("), "--mark=ready=(: not a regular expression"),
        (("--modes", "second-cold"), "cold starts need weights in files"),
        (("--against", "true", "--mark", "ready=a", "--mark", "ready=b"), "--mark=ready=b: ready is given twice"),
        (("--timeout-s", "nan"), "nan: must be a number above 0"),
        (("--out", "nowhere/out.json"), "--out=nowhere/out.json: no file can be written there"),
        (("kv.block_size=0",), "error: kv.block_size=0"),
    ],
)
def test_what_cannot_work_is_said(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = bench(tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_fails_ends_the_benchmark_and_is_shown(tmp_path: Path) -> None:
    done = bench(tmp_path, "-n", "1", "--modes", "first", "device=cpu", "kv.bytes=1MiB")
    assert done.returncode == 1
    assert "ended with 2" in done.stderr and "kv.bytes=" in done.stderr


def test_files_are_dropped_from_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(1 << 22))
    assert drop([path]) <= 0.01
    assert drop([]) == 0.0


def test_modes() -> None:
    given = ["model=x", "cache.dir=/some", "run.seed=1"]
    assert Mode.of("second").overrides(given) == [*given, "startup_plan=use"]
    assert Mode.of("profiled").overrides([*given, "startup_plan=refresh"]) == [*given, "startup_plan=refresh"]
    assert Mode.of("first").overrides(given) == ["model=x", "run.seed=1"]
    cold = Mode.of("zygote-cold")
    assert (cold.name, cold.is_cold, cold.is_forked) == ("zygote-cold", True, True)
    assert cold.command([], Path("/run"))[1:] == [
        "-m",
        "orchestrator.zygote",
        "run",
        "startup_plan=use",
        "run.dir=/run",
    ]
    with pytest.raises(ConfigError, match="there are: first, first-cold"):
        Mode.of("xyz")


def test_the_table_has_medians_and_ranges_of_all_rounds() -> None:
    starts = [made_up(5.0, 1.0), made_up(7.0, 2.0), made_up(6.0, 3.0)]
    rows = rows_of(starts, [4.0, 4.0, 4.0])
    assert rows["load_weights"] == [1.0, 2.0, 3.0]
    assert rows["imports"] == [4.0, 5.0, 3.0]
    assert rows["process above bare import"] == [1.5, 3.5, 2.5]
    assert "warm-up" not in rows and "verify" not in rows and "ready" not in rows
    job = Job(["model=x"], [Mode.of("second")], 3, None, 1.0)
    measured = Measured({"second": starts}, [4.0, 4.0, 4.0], notes=["it rained"])
    lines = table(job, measured).splitlines()
    assert lines[0] == "3 rounds: model=x"
    assert next(line for line in lines if line.startswith("load_weights")).split() == [
        *("load_weights", "2.000", "(1.000", "to", "3.000)", "-")
    ]
    assert lines[-1] == "note: it rained"
    found = as_json(job, measured, records=False)
    assert found["modes"]["second"]["summary"]["total"] == {
        "median": 6.0,
        "min": 5.0,
        "max": 7.0,
        "all": [5.0, 7.0, 6.0],
        "spread": pytest.approx(1 / 3),
    }
    assert found["modes"]["second"]["startup_plan"] == ["hit"] * 3
    assert found["modes"]["second"]["beside"][0] == {"warm-up": 9.0}
