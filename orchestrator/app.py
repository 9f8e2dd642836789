"""The composition root: a validated configuration becomes a device, a cache and stages, and leaves a record."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from orchestrator import pipeline
from orchestrator.artifacts import ENGINE
from orchestrator.beside import Beside
from orchestrator.cache import Cache
from orchestrator.clock import Clock
from orchestrator.conclusion import last_end, ledger_record, set_status, write_as_it_stands
from orchestrator.config import Config, engine_name
from orchestrator.device.base import Device
from orchestrator.early import device_beside, import_torch, tell_neighbours
from orchestrator.engine.base import Engine
from orchestrator.environment import host, versions
from orchestrator.errors import ConfigError, Interrupted
from orchestrator.events import Events
from orchestrator.import_timer import ImportTimer
from orchestrator.importing import import_all, without_collections
from orchestrator.last_words import LastWords
from orchestrator.memory.ledger import Ledger
from orchestrator.planned import card_of, config_of_plan, plan_record
from orchestrator.provenance import provenance
from orchestrator.records import ImportRecord, ImportServerRecord, RunRecord, redact, write_record
from orchestrator.registry import Registry
from orchestrator.report.compare import settings_of
from orchestrator.report.flat import numbers
from orchestrator.report.text import closing_line, table
from orchestrator.rundir import new_run_dir, run_id, started_at
from orchestrator.signals import held_back, let_through, owns_process, second_signal
from orchestrator.skipping import make_room, valid_run
from orchestrator.stage import Context
from orchestrator.state import State
from orchestrator.timeline import Timeline
from orchestrator.tracking import FinishedRun


@dataclass
class Outcome:
    """A finished start: its record, where it lies, and the engine if it is up."""

    record: RunRecord
    exit_code: int
    folder: Path
    engine: Engine | None = None
    ledger: Ledger | None = None
    cleanup: ExitStack = field(default_factory=ExitStack)


def run(
    config: Config,
    *,
    overrides: Sequence[str],
    events: Events,
    clock: Clock,
    registry: Registry,
    run_dir: Path | None = None,
    beside: Beside | None = None,
    import_server: ImportServerRecord | None = None,
) -> Outcome:
    """Start as configured. What fails after the configuration was accepted is in the record, not raised.

    Args:
        overrides: as typed, for the record.
        run_dir: where the record goes; None for `run.dir`, or a new folder.
        beside: what may run beside what; None for everything that gains by it.
        import_server: the process that this one was forked from, if it was.

    Raises:
        UserError: the stages do not fit together, or one of them refuses the configuration.
    """
    timeline = Timeline(clock)
    if import_server is not None:
        timeline.mark("request to the import server", import_server.request_s)
    timeline.mark("interpreter, configuration")
    if config.device.kind == "plan":
        config = config_of_plan(config)
    slots = pipeline.build(config.stages, registry)
    pipeline.check(slots, config, registry)
    wanted = run_dir or (Path(config.run.dir).expanduser() if config.run.dir is not None else None)
    if config.run.skip_existing:
        if (done := valid_run(wanted, config)) is not None:
            events.info(f"skipped: {wanted} has the record of this run (run.skip_existing)")
            return Outcome(done, 0, wanted or Path())
        if remark := make_room(wanted, config):
            events.info(remark)
    # From here on a signal comes where it finds its way into the record, and nowhere else.
    with held_back():
        folder = new_run_dir(wanted)
        beside = beside or Beside(clock)
        return _run_in(folder, config, slots, overrides, events, registry, timeline, beside, import_server)


def _run_in(
    folder: Path,
    config: Config,
    slots: Sequence[pipeline.Slot],
    overrides: Sequence[str],
    events: Events,
    registry: Registry,
    timeline: Timeline,
    beside: Beside,
    import_server: ImportServerRecord | None,
) -> Outcome:
    record = RunRecord(
        run_id=run_id(folder),
        started_at=started_at(timeline.clock),
        overrides=list(overrides),
        config=config.model_dump(mode="json", by_alias=True),
        provenance=provenance(config, registry),
    )
    record.spans = timeline.spans
    record.import_server = import_server
    timeline.mark("check")
    outcome = Outcome(record, 1, folder)
    last_words = LastWords(
        lambda error: write_as_it_stands(record, folder, timeline, outcome.ledger, error), ends_process=owns_process()
    )
    with second_signal(last_words), ImportTimer() as timer:
        stopped_by = _start(config, slots, events, registry, outcome, timeline, last_words, beside)
        pipeline.end_beside(beside, events)
        tell_neighbours(record, beside.spans())
        record.imports = _imports(timer)
        record.import_s = sum(entry.s for entry in record.imports)
        _conclude(outcome, stopped_by, timeline, events, last_words)
    _tell(outcome, slots, registry, events)
    return outcome


def _start(
    config: Config,
    slots: Sequence[pipeline.Slot],
    events: Events,
    registry: Registry,
    outcome: Outcome,
    timeline: Timeline,
    last_words: LastWords,
    beside: Beside,
) -> BaseException | None:
    """Everything that can fail once there is a record; what stopped it, if anything did."""
    ctx: Context | None = None
    record = outcome.record
    record.stages = pipeline.not_run(slots)
    try:
        with let_through():
            pipeline.begin(slots, config, registry, beside)
            with without_collections(keeps_all=owns_process()):
                # Before the engine is resolved: its module imports all the others.
                name = engine_name(config)
                import_torch(beside, with_transformers=registry.origin("engines", name) == "built-in")
                opened = device_beside(beside, choose_device, config, str(outcome.folder), events, outcome.cleanup)
                import_all(registry.resolve("engines", name).imports(config))
            timeline.mark("imports")
            device, place = opened()
            outcome.ledger = ledger = place.ledger
            record.messages += place.notes
            record.device = {**asdict(device.info()), "host": host()}
            record.versions = versions(driver=device.info().driver)
            cache = _cache(config, events)
            ctx = Context(
                config=config,
                device=device,
                cache=cache,
                state=State(),
                ledger=ledger,
                events=events,
                clock=timeline.clock,
                run_dir=outcome.folder,
                run_id=record.run_id,
                resolver=registry.resolve,
                cleanup=outcome.cleanup,
                abandon=last_words,
                beside=beside,
            )
            timeline.mark("device")
            stopped_by = pipeline.run(slots, ctx, record)
            place.settled()
    except (Exception, Interrupted) as error:
        stopped_by = error
    # Ctrl-C in a program of which this start is a part.
    except KeyboardInterrupt:
        stopped_by = Interrupted()
    if stopped_by is not None:
        pipeline.end_open_stage(record, stopped_by, timeline.clock.now())
    timeline.skip(last_end(record))
    if outcome.ledger is not None:
        record.ledger = ledger_record(outcome.ledger)
    if config.device.kind == "plan":
        record.plan = plan_record(record, config, getattr(ctx.device, "assumed", ()) if ctx is not None else ())
    if ctx is not None and ctx.state.has(ENGINE):
        outcome.engine = ctx.state.get(ENGINE)
    return stopped_by


def _imports(timer: ImportTimer) -> list[ImportRecord]:
    """Packages that took a millisecond or more, the slowest first, each with what took ten in it."""
    return [
        ImportRecord(
            package=each.package,
            s=each.s,
            parts=[ImportRecord(package=name, s=s) for name, s in each.parts.items() if s >= 1e-2],
        )
        for each in timer.packages()
        if each.s >= 1e-3
    ]


def choose_device(config: Config) -> Device:
    """The device that the configuration means; `auto` is a GPU if there is one.

    Raises:
        ConfigError: there is no such device.
    """
    import torch

    total = None if config.gpu.total_bytes is None else int(config.gpu.total_bytes)
    kind = config.device.kind
    if kind == "plan":
        from orchestrator.device.plan import PlanDevice

        return PlanDevice(card_of(config), total)
    if kind == "cuda" or (kind == "auto" and torch.cuda.is_available()):
        from orchestrator.device.cuda import CudaDevice

        if not torch.cuda.is_available():
            raise ConfigError.of("device.kind", "torch finds no CUDA device here; device=cpu works", kind)
        return CudaDevice(config.gpu.index, total)
    from orchestrator.device.cpu import CpuDevice

    return CpuDevice(total)


def _cache(config: Config, events: Events) -> Cache:
    return Cache(
        Path(config.cache.dir).expanduser(),
        max_bytes=int(config.cache.max_bytes),
        enabled=config.cache.enabled,
        warn=events.warning,
    )


def _tell(outcome: Outcome, slots: Sequence[pipeline.Slot], registry: Registry, events: Events) -> None:
    """Tell the stages what became of the run; an interruption meanwhile ends this and the engine."""
    record = outcome.record
    settings = {name: redact(value) for name, value in settings_of(record).items()}
    run = FinishedRun(record.run_id, record.status, outcome.folder, settings, numbers(record))
    try:
        with let_through():
            pipeline.conclude(slots, run, registry, events)
    except (Interrupted, KeyboardInterrupt):
        outcome.cleanup.close()
        raise


def _conclude(
    outcome: Outcome, stopped_by: BaseException | None, timeline: Timeline, events: Events, last_words: LastWords
) -> None:
    record = outcome.record
    outcome.exit_code = set_status(record, stopped_by)
    if stopped_by is not None:
        outcome.cleanup.close()
        outcome.engine = None
        timeline.mark("unwinding")
    timeline.mark("record")
    record.total_s = timeline.clock.now()
    with last_words.not_needed():
        path = write_record(record, outcome.folder)
    events.info(table(record))
    events.info(f"record: {path}")
    events.info(closing_line(record))
