"""Load the weights: find the checkpoint, build the model, put its parameters on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from orchestrator.artifacts import ENGINE, MODEL_KNOWN
from orchestrator.beside import Beside, Coming, Task, begin_or_do
from orchestrator.checkpoint import check, locate, weight_files_here
from orchestrator.config import Config as RootConfig
from orchestrator.config import engine_name
from orchestrator.engine.base import Engine, HasFolder, RunsBeside
from orchestrator.loaders import refuse_loader
from orchestrator.memory.snapshot import peak_of
from orchestrator.model_files import model_files
from orchestrator.model_folder import (
    ModelMaker,
    check_maker,
    from_hub,
    is_on_hub,
    maker_for,
    refuse_absent_from_hub,
    refuse_running_code,
    refusing_unreadable,
)
from orchestrator.read_ahead import ReadAhead, read_ahead
from orchestrator.stage import Context, Resolver, Stage, StageConfig
from orchestrator.stages.kernels import load_kernels
from orchestrator.stages.room import refuse_before_loading
from orchestrator.units import format_size

DTYPES = frozenset({"float32", "float16", "bfloat16"})
"""What some device has; which this one lacks is known once it is open."""


class LoadWeightsConfig(StageConfig):
    """No options of its own: which model and how is `model` and `weights`."""


class LoadWeights(Stage[LoadWeightsConfig]):
    Config = LoadWeightsConfig
    provides = (ENGINE,)
    memory_knobs = ("a smaller model", "a narrower model.dtype")

    def __init__(self, config: LoadWeightsConfig) -> None:
        super().__init__(config)
        self._read_ahead: Task[ReadAhead] | None = None
        self._kernels: Coming[str | None] = Coming()
        self._files: Callable[[], dict[str, dict[str, Any]]] = dict

    def check(self, config: RootConfig, resolve: Resolver) -> None:
        cache_dir = Path(config.cache.dir).expanduser()
        make = _makers(resolve)
        refuse_running_code(config.model)
        plans = config.device.kind == "plan"
        if not plans:
            refuse_loader(config.weights.loader, files=config.model.load_format == "auto")
        with refusing_unreadable(config.model):
            maker = maker_for(config.model, make)
            if maker is not None:
                check_maker(config.model, maker, cache_dir)
            elif is_on_hub(config.model, make):
                refuse_absent_from_hub(config.model, make)
            else:
                found = locate(config.model, make=make, cache_dir=cache_dir)
                check(found, config.model, DTYPES)
                if found.is_original and not plans:
                    refuse_loader(config.weights.loader, files=True, original=found.folder)

    def begin(self, config: RootConfig, resolve: Resolver, beside: Beside) -> None:
        """Read the weights' files into the page cache until they are asked for; from then on, load kernels."""
        if config.device.kind in ("auto", "cuda"):
            self._kernels = beside.after(MODEL_KNOWN, "kernels", load_kernels)
        weights = config.weights
        unread = config.model.load_format == "dummy" or config.device.kind == "plan" or weights.loader == "dummy"
        if not unread and weights.io != "direct" and config.model.path is not None:
            model = config.model
            self._read_ahead = beside.begin("read ahead", lambda end: read_ahead(weight_files_here(model), end))

    def run(self, ctx: Context) -> str:
        made_by = ctx.resolve("engines", engine_name(ctx.config))
        engine = made_by(_with_folder(ctx), ctx.device, ctx.resolve, ctx.cache.folder)
        ctx.cleanup.callback(engine.close)
        if isinstance(engine, RunsBeside):
            engine.beside = ctx.beside
        made = maker_for(ctx.config.model, _makers(ctx.resolve)) is not None
        start = ctx.clock.now()
        with peak_of(ctx.device) as peak:
            report = engine.load(ctx.events, lambda weights: self._admit(ctx, engine, weights))
            self._await_kernels(ctx)
            ctx.device.synchronize()
        seconds = report.seconds or ctx.clock.now() - start
        ctx.ledger.charge("weights", report.bytes)
        ctx.metrics.update(
            bytes=report.bytes,
            parameters=report.parameters,
            files=report.files,
            loader=report.loader,
            dtype=report.dtype,
            peak_bytes=peak.above_bytes,
            read_s=round(seconds, 6),
            bytes_per_s=int(report.bytes / seconds) if seconds else None,
            made_here=made,
        )
        if self._read_ahead is not None and self._read_ahead.done:
            ctx.metrics["read_ahead"] = asdict(self._read_ahead.result())
        ctx.metrics["model_files"] = self._files()
        ctx.state.put(ENGINE, engine)
        what = f"{format_size(report.bytes)}, {report.parameters:,} parameters in {report.dtype}, by {report.loader}"
        return f"{what}, configuration and tokenizer made here" if made and report.loader == "dummy" else what

    def _await_kernels(self, ctx: Context) -> None:
        """Before anything reads what memory is held."""
        why = self._kernels.task.result() if self._kernels.task is not None else None
        if why is not None:
            ctx.events.info(f"not every kernel was loaded beside the weights: {why}")

    def _admit(self, ctx: Context, engine: Engine, weights: int) -> None:
        refuse_before_loading(ctx, engine, weights)
        if isinstance(engine, HasFolder):
            folder = engine.model_folder
            self._files = begin_or_do(ctx.beside, "hashes of files", lambda: model_files(folder))
        if ctx.beside is not None:
            ctx.beside.reached(MODEL_KNOWN, (ctx, engine))
        # From here on whoever reads the weights does so himself, in his own order.
        if self._read_ahead is not None:
            self._read_ahead.stopping.set()


def _with_folder(ctx: Context) -> RootConfig:
    """The configuration with a folder for a hub's model, which is downloaded if it is not here."""
    model, make = ctx.config.model, _makers(ctx.resolve)
    if not is_on_hub(model, make):
        return ctx.config
    with ctx.span("download"):
        fetched = from_hub(model, make, ctx.events)
    ctx.metrics.update(revision=fetched.commit, downloaded_bytes=fetched.downloaded_bytes)
    return ctx.config.model_copy(update={"model": model.model_copy(update={"path": str(fetched.folder)})})


def _makers(resolve: Resolver) -> Callable[[str], ModelMaker]:
    return lambda name: cast(ModelMaker, resolve("models", name)())
