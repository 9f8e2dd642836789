"""A stage that hangs is ended where it stands, and a whole record says where that was."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator import pipeline
from orchestrator.device.fake import FakeDevice
from orchestrator.errors import Interrupted, StageError, StageTimeoutError
from orchestrator.records import RunRecord, read_record
from orchestrator.stage import Context, Stage, StageConfig
from tests.test_cli import command, environment
from tests.toy import context


class Sleeps(Stage[StageConfig]):
    def run(self, ctx: Context) -> None:
        with ctx.span("a nap"):
            time.sleep(600)


class Spins(Stage[StageConfig]):
    """In a loop that would swallow any ordinary exception."""

    def run(self, ctx: Context) -> None:
        while True:
            try:
                sum(range(100))
            except Exception:
                continue


class WaitsForALock(Stage[StageConfig]):
    def run(self, ctx: Context) -> None:
        lock = threading.Lock()
        with lock:
            lock.acquire()


class FailsToUnwind(Stage[StageConfig]):
    def run(self, ctx: Context) -> None:
        try:
            time.sleep(600)
        finally:
            raise StageError("unwinding failed too")


class Quick(Stage[StageConfig]):
    error: BaseException | None = None

    def run(self, ctx: Context) -> str:
        if self.error is not None:
            raise self.error
        return "done"


def run(
    folder: Path, stage: type[Stage[Any]], limit: float, ctx: Context | None = None
) -> tuple[RunRecord, BaseException | None]:
    slots = [pipeline.Slot("slow", stage.__name__, "test", stage(StageConfig(use="x", timeout_s=limit)))]
    record = RunRecord(run_id="x", started_at="now", stages=pipeline.not_run(slots))
    return record, pipeline.run(slots, ctx or context(FakeDevice(1000), folder), record)


@pytest.mark.parametrize("stage", [Sleeps, Spins, WaitsForALock, FailsToUnwind])
def test_a_stage_that_takes_too_long_fails_and_says_where_it_stood(tmp_path: Path, stage: type[Stage[Any]]) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    record, stopped_by = run(tmp_path, stage, 0.1)
    assert isinstance(stopped_by, StageTimeoutError)
    assert (stopped_by.slot, stopped_by.seconds, stopped_by.exit_code) == ("slow", 0.1, 1)
    assert any("tests/test_watchdog.py" in place and place.endswith(" in run") for place in stopped_by.place)
    assert str(stopped_by).startswith("stages.slow.timeout_s=0.1: the stage had not ended; it stood")
    assert record.stages[0].status == "failed"
    error = record.stages[0].error
    assert error is not None and (error.type, error.traceback) == ("StageTimeoutError", None)
    assert signal.getsignal(signal.SIGUSR2) is before


def test_the_span_that_it_was_in_is_named(tmp_path: Path) -> None:
    record, stopped_by = run(tmp_path, Sleeps, 0.1)
    assert "in the span 'a nap'" in str(stopped_by)
    assert [span.name for span in record.stages[0].spans] == ["a nap"]


def test_it_works_in_a_thread_that_gets_no_signals(tmp_path: Path) -> None:
    found: list[BaseException | None] = []
    thread = threading.Thread(target=lambda: found.append(run(tmp_path, Spins, 0.1)[1]))
    thread.start()
    thread.join(60)
    assert isinstance(found[0], StageTimeoutError)


def test_what_ends_in_time_is_left_alone(tmp_path: Path) -> None:
    record, stopped_by = run(tmp_path, Quick, 60)
    assert (record.stages[0].status, stopped_by) == ("ok", None)


@pytest.mark.parametrize("error", [StageError("of its own"), Interrupted(signal.SIGTERM)])
def test_what_fails_in_time_keeps_its_own_error(tmp_path: Path, error: BaseException) -> None:
    class Fails(Quick):
        pass

    Fails.error = error
    assert run(tmp_path, Fails, 60)[1] is error


def test_limits_that_end_with_the_stage_leave_nothing_behind(tmp_path: Path) -> None:
    class Borderline(Stage[StageConfig]):
        def run(self, ctx: Context) -> None:
            time.sleep(0.005)

    ctx = context(FakeDevice(1000), tmp_path)
    for _ in range(100):
        stopped_by = run(tmp_path, Borderline, 0.005, ctx)[1]
        assert stopped_by is None or isinstance(stopped_by, StageTimeoutError)
    time.sleep(0.05)


def begin(folder: Path, stage: str, *overrides: str) -> subprocess.Popen[str]:
    arguments = [f"stages.load_weights.use=tests.hanging:{stage}", "device=cpu", "run.dir=run", *overrides]
    dropped = [f"~stages.{slot}" for slot in ("dummy_data", "profile_run", "graph_capture", "clear_caches")]
    dropped += ["~stages.allocate_kv", "~stages.verify"]
    return subprocess.Popen(
        command(*arguments, *dropped),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def check_whole(record: RunRecord, status: str) -> None:
    """A record that has everything a finished one has."""
    assert record.status == status
    assert record.error is not None
    assert record.versions["torch"] and record.device["kind"] == "cpu" and record.ledger is not None
    stage = record.stages[0]
    assert stage.start_s is not None and stage.wall_s is not None
    covered = sum(span.wall_s for span in record.spans if span.beside is None) + stage.wall_s
    assert covered == pytest.approx(record.total_s, rel=1e-3)


def test_a_stage_that_hangs_in_c_leaves_a_whole_record(tmp_path: Path) -> None:
    process = begin(tmp_path, "InC", "stages.load_weights.timeout_s=0.2")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1, errors
    record = read_record(tmp_path / "run")
    check_whole(record, "failed")
    assert record.error is not None and record.error.type == "StageTimeoutError"
    assert "in the span 'kernel' at tests/hanging.py" in record.error.message
    assert record.stages[0].status == "failed"
    assert "error: stages.load_weights.timeout_s=0.2" in errors


def test_a_call_that_keeps_the_interpreter_at_least_ends(tmp_path: Path) -> None:
    process = begin(tmp_path, "InCWithTheInterpreter", "stages.load_weights.timeout_s=0.2")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "hanging.py" in errors


@pytest.mark.parametrize(
    ("stage", "signum"),
    [("Unwinding", signal.SIGINT), ("UnwindingInC", signal.SIGTERM)],
)
def test_a_second_signal_ends_at_once_what_hangs_while_it_unwinds(
    tmp_path: Path, stage: str, signum: signal.Signals
) -> None:
    process = begin(tmp_path, stage)
    wait_for(tmp_path / "started", process)
    process.send_signal(signum)
    wait_for(tmp_path / "unwinding", process)
    process.send_signal(signum)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    record = read_record(tmp_path / "run")
    check_whole(record, "interrupted")
    assert record.stages[0].status == "interrupted"


def test_one_signal_is_enough_for_a_stage_in_python(tmp_path: Path) -> None:
    process = begin(tmp_path, "InPython")
    wait_for(tmp_path / "started", process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    check_whole(read_record(tmp_path / "run"), "interrupted")
