"""Sweeps as a user runs them: each start in a process of its own, on Hydra's launchers, killed, continued, searched."""

from __future__ import annotations

import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing as closing_at_end
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

from orchestrator.__main__ import main
from orchestrator.compose.home import Home
from orchestrator.compose.objective import objective, problem_with, worst
from orchestrator.compose.point import Job
from orchestrator.compose.process import MODULE
from orchestrator.compose.spelling import read, unescaped
from orchestrator.compose.tree import translated
from orchestrator.compose.trials import make_ready
from orchestrator.errors import ConfigError, StageError
from orchestrator.records import KVCacheRecord, RunRecord, read_record
from tests.points import ASLEEP, FitsBelow, Point, only
from tests.starts import command_line, environment

PATIENCE_S = 120.0
LAUNCHERS = {
    "joblib": ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"),
    "submitit": ("hydra/launcher=submitit_local",),
    "ray": ("hydra/launcher=ray", "hydra.launcher.ray.init.num_cpus=2"),
}


def seeds(*values: int) -> tuple[str, ...]:
    return (*only(Point), f"run.seed={','.join(map(str, values))}", "hydra.sweep.dir=sweep")


def sweep(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Exit code, output, errors."""
    process = command_line(folder, "-m", *arguments)
    output, errors = process.communicate(timeout=PATIENCE_S)
    return process.returncode, output, errors


def record(folder: Path, point: int) -> RunRecord:
    return read_record(folder / "sweep" / str(point))


def closing(output: str) -> str:
    # Ray may have more to say after it.
    (line,) = [line for line in output.splitlines() if line.startswith("sweep: ")]
    return line.partition(", records in ")[0]


def row(output: str, point: int) -> list[str]:
    """The line of the table that the output ends with."""
    lines = output.splitlines()
    begin = max(index for index, line in enumerate(lines) if line.startswith("point  "))
    (found,) = [line.split() for line in lines[begin:] if line.split()[:1] == [str(point)]]
    return found


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def asleep(folder: Path, *points: int) -> None:
    until(lambda: all((folder / "sweep" / str(point) / ASLEEP).exists() for point in points))


def starts(folder: Path) -> list[psutil.Process]:
    """Processes of starts whose records go below that folder."""
    found = []
    for each in psutil.process_iter(["cmdline"]):
        words = each.info["cmdline"] or []
        if MODULE in words and any(word.startswith(f"run.dir={folder.resolve()}") for word in words):
            found.append(each)
    return found


def test_each_start_has_its_own_process_and_ends_as_a_record_also_if_it_is_killed(tmp_path: Path) -> None:
    code, output, errors = sweep(tmp_path, *seeds(1, 11, 13))
    assert (code, closing(output)) == (1, "sweep: 3 points, 1 ok, 2 failed")
    records = [record(tmp_path, point) for point in range(3)]
    assert [each.status for each in records] == ["ok", "failed", "failed"]
    pids = {records[point].stages[0].metrics["pid"] for point in (0, 2)}
    assert len(pids) == 2
    killed = records[1].error
    assert killed is not None
    assert (killed.type, killed.message) == (
        "ProcessDied",
        "the process of this start was ended by SIGSEGV and left no record",
    )
    assert killed.traceback is not None and "tests/points.py" in killed.traceback
    assert records[1].config["run"]["seed"] == 11
    assert "error: point 1: the process of this start was ended by SIGSEGV" in errors
    assert (row(output, 0)[1:3], row(output, 1)[1:3]) == (["ok", "1"], ["failed", "11"])
    assert starts(tmp_path) == []

    refused, output, errors = sweep(tmp_path, *seeds(1))
    assert (refused, row(output, 0)[1]) == (2, "failed")
    assert "has the record of an earlier run; run.skip_existing=true goes on with that sweep" in errors
    assert record(tmp_path, 0) == records[0]

    code, output, _ = sweep(tmp_path, *seeds(1, 2, 3), "run.skip_existing=true")
    assert (code, closing(output)) == (0, "sweep: 3 points, 3 ok (1 skipped), 0 failed")
    assert record(tmp_path, 0) == records[0]
    assert [record(tmp_path, point).status for point in (1, 2)] == ["ok", "ok"]
    assert read_record(tmp_path / "sweep/2/run.1.json") == records[2]
    assert "2 has the record of a run that failed; it is kept as run.1.json" in output


@pytest.mark.parametrize("name", list(LAUNCHERS))
def test_other_launchers_carry_the_points(name: str, tmp_path: Path) -> None:
    code, output, errors = sweep(tmp_path, *seeds(1, 13), *LAUNCHERS[name])
    assert code == 1, errors
    assert closing(output) == "sweep: 2 points, 1 ok, 1 failed"
    assert [record(tmp_path, point).status for point in (0, 1)] == ["ok", "failed"]
    assert "status ok" in (tmp_path / "sweep/0/output.log").read_text()
    assert "the third wheel came off" in (tmp_path / "sweep/1/output.log").read_text()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_and_ends_the_sweep(signum: signal.Signals, tmp_path: Path) -> None:
    process = command_line(tmp_path, "-m", *seeds(17, 1))
    asleep(tmp_path, 0)
    process.send_signal(signum)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signum
    assert (record(tmp_path, 0).status, row(output, 0)[1]) == ("interrupted", "interrupted")
    assert not (tmp_path / "sweep/1").exists()
    assert starts(tmp_path) == []


@pytest.mark.parametrize("name", ["joblib", "ray"])
def test_a_signal_reaches_the_starts_of_a_launchers_workers(name: str, tmp_path: Path) -> None:
    process = command_line(tmp_path, "-m", *seeds(17, 17), *LAUNCHERS[name])
    asleep(tmp_path, 0, 1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, closing(output)) == (143, "sweep: 2 points, 0 ok, 2 failed")
    assert [record(tmp_path, point).status for point in (0, 1)] == ["interrupted"] * 2
    until(lambda: starts(tmp_path) == [])


def test_a_killed_sweep_takes_its_start_along_and_is_resumed_by_the_same_command(tmp_path: Path) -> None:
    process = command_line(tmp_path, "-m", *seeds(1, 17))
    asleep(tmp_path, 1)
    first = record(tmp_path, 0)
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    until(lambda: starts(tmp_path) == [])
    assert record(tmp_path, 1).status == "interrupted"

    code, output, _ = sweep(tmp_path, *seeds(1, 2), "run.skip_existing=true")
    assert (code, closing(output)) == (0, "sweep: 2 points, 2 ok (1 skipped), 0 failed")
    assert record(tmp_path, 0) == first


def test_a_start_ends_with_the_sweep_that_its_launchers_worker_is_of(tmp_path: Path) -> None:
    of_sweep = subprocess.Popen(["sleep", "600"])
    arguments = (*only(Point), "run.seed=17", f"run.dir={tmp_path / 'sweep/0'}")
    askers = f"{os.getpid()},{of_sweep.pid}"
    process = subprocess.Popen([sys.executable, "-m", MODULE, askers, "here", *arguments], env=environment())
    asleep(tmp_path, 0)
    of_sweep.kill()
    assert process.wait(PATIENCE_S) == 143
    assert record(tmp_path, 0).status == "interrupted"
    of_sweep.wait()
    gone = Home(of_sweep.pid, Home.here().place)
    with pytest.raises(StageError, match="the process of the sweep has ended"):
        Job("one", gone, ())(OmegaConf.create())
    elsewhere = Home(of_sweep.pid, "another machine")
    assert (elsewhere.is_gone, elsewhere.pid_here, Home.here().pid_here) == (False, None, os.getpid())


# Optuna's own code uses what others have deprecated.
@pytest.mark.filterwarnings("ignore")
def test_what_a_sweeper_cannot_do_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["-m", *seeds(1, 2), "hydra/sweeper=optuna", "hydra.sweeper.n_trials=0"]) == 2
    output, errors = capsys.readouterr()
    assert (closing(output), "best:" in output) == ("sweep: 0 points, 0 ok, 0 failed", False)
    assert errors.splitlines()[-1] == "error: the sweep cannot run: ValueError: No trials are completed yet."
    assert "Traceback" not in errors


@pytest.mark.filterwarnings("ignore")
def test_a_database_that_cannot_be_used_is_named_without_its_password() -> None:
    with pytest.raises(ConfigError) as refused:
        make_ready("nonsense://ann:s3cret@host/trials")
    assert str(refused.value).startswith("hydra.sweeper.storage=nonsense://***@host/trials: cannot be used: ")


def test_optuna_finds_the_largest_share_that_works(tmp_path: Path) -> None:
    search = ("hydra/sweeper=optuna", "hydra.sweeper.direction=maximize", "hydra.sweeper.sampler.seed=3")
    kept = ("hydra.sweeper.storage=sqlite:///trials.db", "hydra.sweeper.study_name=shares")
    few = ("hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=1", "gpu.util=interval(0.5,0.99)", "hydra.sweep.dir=sweep")
    code, output, errors = sweep(tmp_path, *only(FitsBelow), *search, *few, *kept)
    assert code == 0, errors
    points = [record(tmp_path, point) for point in range(4)]
    worked = {point: each.config["gpu"]["util"] for point, each in enumerate(points) if each.status == "ok"}
    assert 0 < len(worked) < 4
    best = max(worked, key=lambda point: worked[point])
    assert f"best: point {best}, gpu.util={worked[best]}" in output
    assert f"best_value: {worked[best]}" in (tmp_path / "sweep/optimization_results.yaml").read_text()
    with closing_at_end(sqlite3.connect(tmp_path / "trials.db")) as trials:
        assert trials.execute("SELECT COUNT(*) FROM trials WHERE state = 'COMPLETE'").fetchone() == (4,)


@pytest.mark.parametrize(
    ("override", "why"),
    [
        (
            "gpu.util=interval(0.5,0.9)",
            "an interval needs a sweeper that draws from it: hydra/sweeper=optuna; or list the values",
        ),
        ("run.dir=mine", "the records of a sweep go to hydra.sweep.dir; give that"),
    ],
)
def test_what_no_sweep_can_have_is_refused(
    override: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["-m", override]) == 2
    assert capsys.readouterr().err == f"error: {override}: {why}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_asked_of_the_import_server_has_its_starts_forked_from_it(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # The name of a socket has to be short.
    surroundings = {**environment(), "XDG_RUNTIME_DIR": str(tmp_path_factory.mktemp("x"))}

    def server(*arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "orchestrator.zygote", *arguments],
            cwd=tmp_path,
            env=surroundings,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        return done.returncode, done.stdout

    assert server("start")[0] == 0
    try:
        code, output = server("run", "-m", *seeds(1, 11))
        assert (code, closing(output)) == (1, "sweep: 2 points, 1 ok, 1 failed")
        started = record(tmp_path, 0).import_server
        assert started is not None
        assert started.pid == json.loads(server("status", "--json")[1])["pid"]
        killed = record(tmp_path, 1).error
        assert killed is not None and "left no record" in killed.message
    finally:
        server("stop")


def test_what_a_search_gets_is_the_one_number_that_is_searched_or_else_the_tokens_of_cache() -> None:
    cache = KVCacheRecord(
        num_gpu_blocks=8, block_size=16, bytes_per_block=1, bytes=8, num_tokens=128, max_concurrency=1.0
    )
    started = RunRecord(run_id="one", started_at="", kv_cache=cache)
    config = {"gpu": {"util": 0.7}, "engine": {"attention": "triton"}, "log": {"json": True}}
    assert objective(config, ["gpu.util"], started) == 0.7
    assert objective(config, ["gpu.util", "run.seed"], started) == 128
    assert [objective(config, [one], started) for one in ("engine.attention", "log.json", "no.such")] == [128.0] * 3
    assert objective(config, [], None) == 0.0
    assert worst("maximize") == worst(SimpleNamespace(name="maximize")) == -math.inf
    assert worst("minimize") == math.inf
    assert problem_with("minimize") is problem_with(None) is None
    assert str(problem_with("maximise")) == (
        "hydra.sweeper.direction=maximise: a start has one number; minimize or maximize works"
    )


def test_what_hydra_spelled_is_read_as_it_was_meant() -> None:
    assert unescaped(r"+stages.x.use=my_file\:Mine") == "+stages.x.use='my_file:Mine'"
    assert read(unescaped(r"+stages.x.use=my_file\:Mine")).spelled == "+stages.x.use='my_file:Mine'"
    for text in ("gpu.util=0.5", "graphs.sizes=[1,2]", r"mm.processor_kwargs={a\:b:1}", "~stage@stages.verify=null"):
        assert unescaped(text) == text


def test_a_launcher_whose_package_is_missing_names_the_extra() -> None:
    error = MissingConfigException("", "hydra/launcher/submitit_slurm", ["basic"])
    assert str(translated(error)) == (
        "hydra/launcher=submitit_slurm: comes with a package that is not installed; "
        "pip install 'orchestrator[submitit]'"
    )


def test_the_number_of_a_process_is_not_taken_for_a_parents(tmp_path: Path) -> None:
    """The start of a sweep that died before it could ask the kernel for its end."""
    command = [sys.executable, "-m", MODULE, str(os.getpid() + 1), "here", f"run.dir={tmp_path / 'run'}"]
    assert subprocess.run(command, env=environment(), check=False).returncode == 143
    assert list(tmp_path.iterdir()) == []
