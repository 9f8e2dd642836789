"""The pipeline: build it from the configuration, check that it fits together, run it, record it."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from orchestrator.artifacts import ENGINE, KV_CACHE
from orchestrator.beside import Beside
from orchestrator.config import Config, engine_name
from orchestrator.errors import (
    ConfigError,
    Interrupted,
    OrchestratorError,
    PipelineError,
    Problem,
    StageTimeoutError,
    UnknownNameError,
)
from orchestrator.events import Events
from orchestrator.memory.snapshot import Snapshot
from orchestrator.out_of_memory import explained, is_out_of_memory, let_go
from orchestrator.records import ErrorRecord, KVCacheRecord, MemoryRecord, RunRecord, StageMemory, StageRecord
from orchestrator.registry import Registry
from orchestrator.signals import owns_process
from orchestrator.stage import Context, Skipped, Stage
from orchestrator.state import Key
from orchestrator.tracking import FinishedRun
from orchestrator.validation import problems_of
from orchestrator.watchdog import run_within


@dataclass(frozen=True)
class Slot:
    """A stage at its place in the pipeline."""

    name: str
    use: str
    origin: str
    stage: Stage[Any]


def build(stages: Mapping[str, Mapping[str, Any]], registry: Registry) -> list[Slot]:
    """Stage objects, in order, each from its own validated options.

    Raises:
        ConfigError: with every problem of every stage.
    """
    slots: list[Slot] = []
    problems: list[Problem] = []
    for name, options in stages.items():
        use = options.get("use") if isinstance(options, Mapping) else None
        if not isinstance(use, str):
            problems.append(Problem(f"stages.{name}", "a stage needs `use`: its name in the registry, or module:Class"))
            continue
        try:
            cls = registry.resolve("stages", use)
            slots.append(Slot(name, use, registry.origin("stages", use), cls(cls.Config(**options))))
        except UnknownNameError as error:
            problems.append(Problem(f"stages.{name}.use", str(error).partition(": ")[2], use))
        except ValidationError as error:
            problems.extend(problems_of(error, f"stages.{name}", cls.Config))
    if problems:
        raise ConfigError(problems)
    return slots


def check(slots: Sequence[Slot], config: Config, registry: Registry) -> None:
    """Refuse stages that do not fit together, then whatever a stage itself can refuse beforehand.

    Raises:
        UserError: with what is missing and who could provide it.
    """
    for group, field, name in _named(config):
        if name != "auto":
            registry.check(group, name, field)
    provided: dict[str, str] = {}
    for slot in slots:
        for key in slot.stage.required(config):
            if key.name not in provided:
                raise PipelineError(_nobody_provides(slot, key, slots))
        for key in slot.stage.provides:
            if key.name in provided:
                raise PipelineError(
                    f"stages.{slot.name} ({slot.use}) and stages.{provided[key.name]} both provide '{key}'; drop one"
                )
            provided[key.name] = slot.name
    for slot in slots:
        slot.stage.check(config, registry.resolve)


def _named(config: Config) -> Sequence[tuple[str, str, str]]:
    """What the configuration asks for by name: the group, the field and the name."""
    return (
        ("engines", "engine.name", engine_name(config)),
        ("loaders", "weights.loader", config.weights.loader),
        ("attention", "engine.attention", config.engine.attention),
        ("profilers", "model.profiler", config.model.profiler),
    )


def _nobody_provides(slot: Slot, key: Key[Any], slots: Sequence[Slot]) -> str:
    later = next((other for other in slots if key in other.stage.provides), None)
    who = f"stages.{later.name} does, but comes later" if later else "no stage of this pipeline does"
    return f"stages.{slot.name} ({slot.use}) needs '{key}', and nothing before it provides it: {who}"


def begin(slots: Sequence[Slot], config: Config, registry: Registry, beside: Beside) -> None:
    """Let each stage leave what is to run beside earlier ones."""
    for slot in slots:
        slot.stage.begin(config, registry.resolve, beside)


def not_run(slots: Sequence[Slot]) -> list[StageRecord]:
    """The records of stages before any has run."""
    return [StageRecord(slot=slot.name, use=slot.use, origin=slot.origin) for slot in slots]


def run(slots: Sequence[Slot], ctx: Context, record: RunRecord) -> BaseException | None:
    """Run the stages in order, filling in `record.stages`; what stopped the run, if anything did.

    Never raises for a stage's failure: stages that did not run are in the record as such, and what the stages that did
    run hold is given back.
    """
    start = ctx.clock.now()
    for slot, entry in zip(slots, record.stages, strict=True):
        stopped_by = _run_one(slot, entry, ctx, start)
        if record.ready_s is None and ctx.state.has(KV_CACHE):
            record.ready_s = ctx.clock.now()
            record.kv_cache = _kv_record(ctx)
        if stopped_by is not None:
            end_beside(ctx.beside, ctx.events)
            ctx.state.clear()
            ctx.cleanup.close()
            return stopped_by
        assert entry.start_s is not None and entry.wall_s is not None
        start = entry.start_s + entry.wall_s
    return None


def conclude(slots: Sequence[Slot], run: FinishedRun, registry: Registry, events: Events) -> None:
    """Let each stage do what it does with a finished run."""
    for slot in slots:
        try:
            line = slot.stage.concluded(run, registry.resolve)
        # Nothing that comes after the record may change what the run was.
        except Exception as error:
            events.warning(f"stages.{slot.name}: {_first_line(error)}; the record is in {run.folder}")
        else:
            if line:
                events.info(f"{slot.name}: {line}")


def end_beside(beside: Beside | None, events: Events) -> None:
    """End what still runs beside the stages, before what it works on is given back."""
    for name in beside.close() if beside is not None else ():
        events.warning(f"{name}: did not end when it was told to; it is left behind")


def _run_one(slot: Slot, entry: StageRecord, ctx: Context, start: float) -> BaseException | None:
    ctx.metrics, ctx.spans = entry.metrics, entry.spans
    ctx.open_spans.clear()
    ctx.peaks.clear()
    entry.start_s = start
    ctx.device.reset_peak()
    before = ctx.device.snapshot()
    entry.memory = StageMemory(before=_reading(before))
    stopped_by: BaseException | None = None
    summary = ""
    try:
        summary = _within_limit(slot, ctx) or ""
        _check_provided(slot, ctx)
        entry.status = "ok"
    except Skipped as reason:
        entry.status, summary = "skipped", str(reason)
        entry.metrics["reason"] = str(reason)
    except Interrupted as interrupt:
        entry.status, stopped_by, summary = "interrupted", interrupt, str(interrupt)
    except Exception as error:
        stopped_by = _failure(error, slot, ctx)
        entry.status, summary = "failed", _first_line(stopped_by)
        entry.error = error_record(stopped_by)
        let_go(stopped_by)
    snapshot = ctx.device.snapshot()
    ctx.ledger.saw(snapshot)
    entry.memory.after = _reading(snapshot)
    peaks = ctx.peaks or {slot.name: max(0, snapshot.peak_bytes - before.allocated_bytes)}
    entry.memory.peak_part = max(peaks, key=lambda part: peaks[part])
    entry.memory.peak_bytes = peaks[entry.memory.peak_part]
    entry.wall_s = ctx.clock.now() - start
    ctx.events.stage(slot.name, entry.status, entry.wall_s, summary)
    return stopped_by


def _failure(error: Exception, slot: Slot, ctx: Context) -> Exception:
    """The error as the user shall read it."""
    if not is_out_of_memory(error):
        return error
    has_ceiling = ctx.config.kv.bytes == "auto"
    knobs, reading = slot.stage.memory_knobs, ctx.device.snapshot()
    told = explained(error, slot.name, knobs, ctx.ledger, reading, has_ceiling=has_ceiling)
    told.__cause__ = error
    return told


def _within_limit(slot: Slot, ctx: Context) -> str | None:
    def work() -> str | None:
        try:
            summary = slot.stage.run(ctx)
        # From a function that was written for a command: the start would end without a record.
        except SystemExit as end:
            raise RuntimeError(f"sys.exit({end.code!r}) was called") from end
        ctx.device.synchronize()
        return summary

    def abandon(error: StageTimeoutError) -> None:
        if ctx.abandon is not None:
            ctx.abandon(error)

    return run_within(
        slot.stage.config.timeout_s,
        work,
        slot=slot.name,
        open_spans=ctx.open_spans,
        abandon=abandon,
        ends_process=ctx.abandon is not None and owns_process(),
    )


def end_open_stage(record: RunRecord, error: BaseException, now_s: float) -> None:
    """Close the record of a stage that something other than itself has ended."""
    for entry in record.stages:
        if entry.start_s is not None and entry.wall_s is None:
            entry.wall_s = now_s - entry.start_s
            entry.status = "interrupted" if isinstance(error, Interrupted) else "failed"
            entry.error = None if isinstance(error, Interrupted) else error_record(error)


def _check_provided(slot: Slot, ctx: Context) -> None:
    for key in slot.stage.provides:
        if not ctx.state.has(key):
            raise PipelineError(f"stages.{slot.name} ({slot.use}) promised '{key}' and did not provide it")


def error_record(error: BaseException) -> ErrorRecord:
    """An error for the record; with its traceback where it is not one that this project raises on purpose."""
    expected = isinstance(error, OrchestratorError | Interrupted)
    trace = None if expected else "".join(traceback.format_exception(error))
    return ErrorRecord(type=type(error).__name__, message=str(error), traceback=trace)


def _first_line(error: BaseException) -> str:
    text = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {text}"


def _kv_record(ctx: Context) -> KVCacheRecord:
    kv = ctx.state.get(KV_CACHE)
    tokens = kv.num_blocks * kv.block_size
    longest = ctx.state.get(ENGINE).max_model_len if ctx.state.has(ENGINE) else tokens
    return KVCacheRecord(
        num_gpu_blocks=kv.num_blocks,
        block_size=kv.block_size,
        bytes_per_block=kv.bytes_per_block,
        bytes=kv.bytes,
        num_tokens=tokens,
        max_concurrency=tokens / longest,
        limited_by=kv.limited_by,
    )


def _reading(snapshot: Snapshot) -> MemoryRecord:
    return MemoryRecord(
        ours_bytes=snapshot.ours_bytes,
        allocated_bytes=snapshot.allocated_bytes,
        reserved_bytes=snapshot.reserved_bytes,
        peak_bytes=snapshot.peak_bytes,
        free_bytes=snapshot.free_bytes,
    )
