"""What runs beside what in whole starts, and how a start ends when something beside fails, hangs or is not wanted."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import app
from orchestrator.beside import Beside, Stopped
from orchestrator.clock import Clock
from orchestrator.compose import compose
from orchestrator.device.base import Device, DeviceInfo
from orchestrator.device.fake import FakeDevice
from orchestrator.early import device_beside
from orchestrator.errors import BudgetError
from orchestrator.events import SilentEvents
from orchestrator.promises import desk_of
from orchestrator.records import RunRecord, Span
from orchestrator.registry import Registry
from orchestrator.units import GiB
from tests.starts import SMALL, command_line, only_record, statuses
from tests.tiny_models import text_folder
from tests.toy import Lines, composed

PROFILE_ONLY = ("pipeline=profile_only", "startup_plan=off")
SLOW = ("model.profiler=tests.planted:SlowProfiler", *PROFILE_ONLY)


def start(folder: Path, *overrides: str, without: tuple[str, ...] = ()) -> tuple[int, RunRecord]:
    """A start in this process."""
    registry, clock = Registry.discover(), Clock.from_now()
    config = compose(list(overrides), registry=registry).config
    beside = Beside(clock, without)
    outcome = app.run(
        config,
        overrides=overrides,
        events=SilentEvents(),
        clock=clock,
        registry=registry,
        run_dir=folder,
        beside=beside,
    )
    outcome.cleanup.close()
    return outcome.exit_code, outcome.record


def beside_spans(record: RunRecord) -> dict[str, Span]:
    return {span.name: span for span in record.spans if span.beside is not None}


def covered(record: RunRecord) -> float:
    """The share of the run that top-level intervals cover, without what ran beside them."""
    intervals = [(span.start_s, span.wall_s) for span in record.spans if span.beside is None]
    intervals += [(stage.start_s, stage.wall_s or 0.0) for stage in record.stages if stage.start_s is not None]
    end = total = 0.0
    for start_s, wall_s in sorted(intervals):
        total += max(0.0, start_s + wall_s - max(end, start_s))
        end = max(end, start_s + wall_s)
    return total / record.total_s


def test_the_record_says_what_ran_beside_the_weights(tmp_path: Path) -> None:
    code, record = start(tmp_path / "run", *SMALL, *PROFILE_ONLY)
    assert code == 0, record.error
    found = beside_spans(record)
    assert {"processor", "dummy data"} <= found.keys()
    assert "load_weights" in (found["processor"].beside or "")
    (stage,) = [stage for stage in record.stages if stage.slot == "dummy_data"]
    (fetch,) = [span for span in stage.spans if span.name == "fetch image"]
    assert fetch.beside is not None and fetch.beside.startswith("load_weights")
    assert stage.metrics["modalities"]["image"]["tokens"] > 0
    assert covered(record) >= 0.999
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("beside")]


def test_a_start_without_anything_beside_comes_to_the_same(tmp_path: Path) -> None:
    names = ("read ahead", "open device", "processor", "dummy data", "hashes of files")
    code, plain = start(tmp_path / "plain", *SMALL, *PROFILE_ONLY, without=names)
    assert code == 0 and beside_spans(plain) == {}
    _, record = start(tmp_path / "beside", *SMALL, *PROFILE_ONLY)
    assert statuses(record) == statuses(plain)
    for mine, other in zip(record.stages, plain.stages, strict=True):
        assert mine.metrics.keys() == other.metrics.keys()
    mine, other = (stages[1].metrics["modalities"]["image"] for stages in (record.stages, plain.stages))
    assert (mine["tokens"], mine["shape"], mine["bytes"]) == (other["tokens"], other["shape"], other["bytes"])


def test_files_are_read_while_modules_are_imported(tmp_path: Path) -> None:
    text_folder(tmp_path / "model")
    process = command_line(
        tmp_path, "device=cpu", "model=auto", f"model.path={tmp_path / 'model'}", *PROFILE_ONLY, "kv.bytes=need"
    )
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    record = only_record(tmp_path)
    assert (beside_spans(record)["read ahead"].beside or "").startswith("imports")
    said = record.stages[0].metrics["read_ahead"]
    assert said["read_bytes"] + said["cached_bytes"] == sum(
        path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors")
    )


def test_what_fails_beside_fails_at_its_own_stage(tmp_path: Path) -> None:
    code, record = start(tmp_path, *SMALL, *PROFILE_ONLY, "model.profiler=tests.planted:BrokenProfiler")
    assert (code, statuses(record)) == (1, ["ok", "failed", "not_run"])
    assert record.error is not None and record.error.message == "the tape measure broke"


def test_a_processor_that_cannot_be_read_fails_where_the_model_is_loaded(tmp_path: Path) -> None:
    code, record = start(tmp_path, *SMALL, *PROFILE_ONLY, "mm.processor_kwargs={no_such_option: 1}")
    assert (code, statuses(record)) == (2, ["failed", "not_run", "not_run"])
    assert record.error is not None and "no_such_option" in record.error.message


def test_when_the_weights_fail_nothing_goes_on_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, record = start(tmp_path, *SMALL, *SLOW, "engine.name=tests.planted:NoWeights")
    assert (code, statuses(record)) == (1, ["failed", "not_run", "not_run"])
    assert record.error is not None and record.error.message == "the weights fell off the bus"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("beside")]


def test_a_time_limit_holds_while_what_runs_beside_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, record = start(tmp_path, *SMALL, *SLOW, "stages.dummy_data.timeout_s=0.5")
    assert (code, statuses(record)) == (1, ["ok", "failed", "not_run"])
    assert record.error is not None and record.error.type == "StageTimeoutError"


def test_ctrl_c_while_what_runs_beside_is_waited_for(tmp_path: Path) -> None:
    process = command_line(tmp_path, *SMALL, *SLOW)
    end = time.monotonic() + 120
    while not (tmp_path / "asleep").exists() and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    record = only_record(tmp_path)
    assert record.status == "interrupted" and "interrupted" in statuses(record)


class CudaLike(FakeDevice):
    """A fake that is opened as a GPU is."""

    opened_by: str | None = None

    def info(self) -> DeviceInfo:
        return replace(super().info(), kind="cuda", uuid="GPU-of-test-overlap")

    def open(self) -> None:
        self.opened_by = self.opened_by or threading.current_thread().name
        super().open()


def begin_to_open(
    device: Device, lines: Lines, cleanup: ExitStack, beside: Beside, *overrides: str
) -> tuple[Device, int]:
    config = composed("device=auto", "kv.bytes=auto", *overrides)
    wait = device_beside(beside, lambda _: device, config, "runs/this", lines, cleanup)
    found, place = wait()
    return found, place.ledger.accounts["context"]


@pytest.fixture
def own_desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.usefixtures("own_desk")
def test_a_gpu_is_opened_in_a_thread_and_its_context_is_counted() -> None:
    device = CudaLike(80 * GiB, context_bytes=GiB)
    beside, lines = Beside(Clock.from_now()), Lines()
    with ExitStack() as cleanup:
        assert begin_to_open(device, lines, cleanup, beside, "gpu.util=0.5") == (device, GiB)
        assert device.opened_by == "beside: open device"
        (promise,) = desk_of("GPU-of-test-overlap").others().promises
        assert promise.requested_bytes == 40 * GiB
    assert desk_of("GPU-of-test-overlap").others().promises == ()


def test_a_cpu_is_opened_by_the_caller_so_that_imports_are_not_charged_to_the_start() -> None:
    class Plain(CudaLike):
        def info(self) -> DeviceInfo:
            return DeviceInfo("cpu", "fake", self.total_bytes)

    device = Plain(GiB)
    with ExitStack() as cleanup:
        begin_to_open(device, Lines(), cleanup, Beside(Clock.from_now()))
    assert device.opened_by == threading.current_thread().name


@pytest.mark.usefixtures("own_desk")
def test_a_share_that_is_not_free_is_refused_where_the_device_is_needed() -> None:
    device = CudaLike(80 * GiB, others_bytes=60 * GiB)
    with ExitStack() as cleanup, pytest.raises(BudgetError, match=r"gpu\.util=0\.25 could"):
        begin_to_open(device, Lines(), cleanup, Beside(Clock.from_now()), "gpu.util=0.5")
    assert device.opened_by is None


@pytest.mark.usefixtures("own_desk")
def test_a_start_that_ends_while_it_waits_for_another_leaves_no_promise() -> None:
    desk = desk_of("GPU-of-test-overlap")
    other = desk.promise(70 * GiB, "runs/other")
    beside, lines = Beside(Clock.from_now()), Lines()
    device = CudaLike(80 * GiB)
    with ExitStack() as cleanup:
        config = composed("device=auto", "kv.bytes=auto", "gpu.util=0.5")
        wait = device_beside(beside, lambda _: device, config, "runs/this", lines, cleanup)
        end = time.monotonic() + 10
        while not lines.said and time.monotonic() < end:
            time.sleep(0.01)
        assert lines.said and lines.said[0].startswith("waiting for process")
        assert beside.close() == []
        with pytest.raises(Stopped):
            wait()
    assert [promise.run_dir for promise in desk.others().promises] == ["runs/other"]
    other.close()
