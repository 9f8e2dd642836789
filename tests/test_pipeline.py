"""Building, checking, running and recording a pipeline, with stages of the test's own."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator import pipeline
from orchestrator.artifacts import KV_CACHE, KVAllocation
from orchestrator.device.fake import FakeDevice
from orchestrator.errors import ConfigError, Interrupted, PipelineError, StageError
from orchestrator.records import RunRecord
from orchestrator.registry import Registry
from orchestrator.stage import Context, Skipped, Stage, StageConfig
from orchestrator.state import Key
from tests.toy import Lines, composed, context

NUMBER: Key[int] = Key("number", int)


class MakeConfig(StageConfig):
    value: int = 3


class Make(Stage[MakeConfig]):
    Config = MakeConfig
    provides = (NUMBER,)

    def run(self, ctx: Context) -> str:
        with ctx.span("inside"):
            ctx.state.put(NUMBER, self.config.value)
        ctx.metrics["value"] = self.config.value
        return "made"


class Use(Stage[StageConfig]):
    requires = (NUMBER,)

    def run(self, ctx: Context) -> None:
        ctx.metrics["seen"] = ctx.state.get(NUMBER)


class Break(Stage[StageConfig]):
    error: BaseException = StageError("no")

    def run(self, ctx: Context) -> None:
        raise self.error


class Promise(Stage[StageConfig]):
    provides = (NUMBER,)

    def run(self, ctx: Context) -> None:
        return None


class Skip(Stage[StageConfig]):
    def run(self, ctx: Context) -> None:
        raise Skipped("nothing to do here")


class Allocate(Stage[StageConfig]):
    provides = (KV_CACHE,)

    def run(self, ctx: Context) -> None:
        ctx.state.put(KV_CACHE, KVAllocation(4, 16, 128, 512, "util"))


def slot(stage: type[Stage[Any]], name: str | None = None) -> pipeline.Slot:
    config = stage.Config(use=stage.__name__)
    return pipeline.Slot(name or stage.__name__.lower(), stage.__name__, "test", stage(config))


def run(folder: Path, slots: Sequence[pipeline.Slot], lines: Lines | None = None) -> tuple[RunRecord, Any, Context]:
    ctx = context(FakeDevice(1000), folder, events=lines)
    record = RunRecord(run_id="x", started_at="now", stages=pipeline.not_run(slots))
    return record, pipeline.run(slots, ctx, record), ctx


def test_stages_run_in_order_and_leave_a_gapless_record(tmp_path: Path) -> None:
    record, stopped_by, _ = run(tmp_path, [slot(Make), slot(Use), slot(Allocate)])
    assert stopped_by is None
    assert [stage.status for stage in record.stages] == ["ok", "ok", "ok"]
    assert record.stages[1].metrics == {"seen": 3}
    assert [span.name for span in record.stages[0].spans] == ["inside"]
    for before, after in zip(record.stages, record.stages[1:], strict=False):
        assert before.start_s is not None and before.wall_s is not None
        assert after.start_s == pytest.approx(before.start_s + before.wall_s)
    assert record.ready_s is not None
    assert record.kv_cache is not None and record.kv_cache.num_tokens == 64


def test_a_failure_stops_the_run_is_recorded_and_gives_everything_back(tmp_path: Path) -> None:
    closed: list[str] = []
    slots = [slot(Make), slot(Break), slot(Use)]
    ctx = context(FakeDevice(1000), tmp_path)
    ctx.cleanup.callback(closed.append, "engine")
    record = RunRecord(run_id="x", started_at="now", stages=pipeline.not_run(slots))
    stopped_by = pipeline.run(slots, ctx, record)
    assert isinstance(stopped_by, StageError)
    assert [stage.status for stage in record.stages] == ["ok", "failed", "not_run"]
    error = record.stages[1].error
    assert error is not None
    assert (error.type, error.message, error.traceback) == ("StageError", "no", None)
    assert closed == ["engine"]
    assert not ctx.state.has(NUMBER)


def test_an_unexpected_error_keeps_its_traceback(tmp_path: Path) -> None:
    class Surprise(Break):
        error = ZeroDivisionError("oh")

    record, stopped_by, _ = run(tmp_path, [slot(Surprise)])
    assert isinstance(stopped_by, ZeroDivisionError)
    assert record.stages[0].error is not None
    assert "test_pipeline.py" in (record.stages[0].error.traceback or "")


def test_a_stage_that_would_end_the_process_fails(tmp_path: Path) -> None:
    class Exits(Make):
        def run(self, ctx: Context) -> str:
            sys.exit(0)

    record, stopped_by, _ = run(tmp_path, [slot(Exits)])
    assert str(stopped_by) == "sys.exit(0) was called"
    assert record.stages[0].error is not None
    assert "test_pipeline.py" in (record.stages[0].error.traceback or "")


def test_an_interruption_is_a_status_of_its_own(tmp_path: Path) -> None:
    class Interrupt(Break):
        error = Interrupted(signal.SIGTERM)

    record, stopped_by, _ = run(tmp_path, [slot(Interrupt), slot(Skip)])
    assert isinstance(stopped_by, Interrupted) and stopped_by.exit_code == 143
    assert [stage.status for stage in record.stages] == ["interrupted", "not_run"]


def test_a_skipped_stage_says_why_and_the_run_goes_on(tmp_path: Path) -> None:
    record, stopped_by, _ = run(tmp_path, [slot(Skip), slot(Make)])
    assert stopped_by is None
    assert (record.stages[0].status, record.stages[0].metrics) == ("skipped", {"reason": "nothing to do here"})


def test_a_broken_promise_fails_the_stage_that_made_it(tmp_path: Path) -> None:
    record, stopped_by, _ = run(tmp_path, [slot(Promise)])
    assert "promised 'number'" in str(stopped_by)
    assert record.stages[0].status == "failed"


def test_a_missing_artifact_is_found_before_anything_runs() -> None:
    config, registry = composed(), Registry.discover()
    with pytest.raises(PipelineError, match=r"stages\.use \(Use\) needs 'number'.*no stage of this pipeline does"):
        pipeline.check([slot(Use)], config, registry)
    with pytest.raises(PipelineError, match=r"stages\.make does, but comes later"):
        pipeline.check([slot(Use), slot(Make)], config, registry)
    with pytest.raises(PipelineError, match=r"both provide 'number'; drop one"):
        pipeline.check([slot(Make), slot(Make, "again")], config, registry)
    pipeline.check([slot(Make), slot(Use)], config, registry)


def test_all_problems_of_all_stages_are_named_together() -> None:
    stages: dict[str, dict[str, Any]] = {
        "a": {"use": "verify", "num_request": 3},
        "b": {"use": "verfy"},
        "c": {},
        "d": {"use": "verify", "num_requests": 0},
    }
    with pytest.raises(ConfigError) as refused:
        pipeline.build(stages, Registry.discover())
    fields = [problem.field for problem in refused.value.problems]
    assert fields == ["stages.a.num_request", "stages.b.use", "stages.c", "stages.d.num_requests"]
    assert "did you mean num_requests?" in str(refused.value)
    assert "did you mean verify?" in str(refused.value)


def test_a_class_of_ones_own_is_named_by_its_module() -> None:
    slots = pipeline.build({"mine": {"use": "tests.test_pipeline:Make", "value": 7}}, Registry.discover())
    assert isinstance(slots[0].stage, Make | Stage)
    assert slots[0].stage.config.value == 7
