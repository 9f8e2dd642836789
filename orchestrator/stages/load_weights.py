"""Load the weights: find the checkpoint, build the model, put its parameters on the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

from orchestrator.artifacts import ENGINE
from orchestrator.checkpoint import check, locate
from orchestrator.config import Config as RootConfig
from orchestrator.memory.snapshot import peak_of
from orchestrator.model_folder import HUB_ID, ModelMaker, check_maker, maker_for
from orchestrator.stage import Context, Resolver, Stage, StageConfig
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

    def check(self, config: RootConfig, resolve: Resolver) -> None:
        path, cache_dir = config.model.path, Path(config.cache.dir).expanduser()
        make = _makers(resolve)
        maker = maker_for(config.model, make)
        if maker is not None:
            check_maker(config.model, maker, cache_dir)
        elif path is not None and (Path(path).expanduser().exists() or not HUB_ID.fullmatch(path)):
            found = locate(config.model, make=make, cache_dir=cache_dir)
            check(found, config.model, DTYPES)

    def run(self, ctx: Context) -> str:
        engine = ctx.resolve("engines", ctx.config.engine.name)(ctx.config, ctx.device, ctx.resolve, ctx.cache.folder)
        ctx.cleanup.callback(engine.close)
        made = maker_for(ctx.config.model, _makers(ctx.resolve)) is not None
        start = ctx.clock.now()
        with peak_of(ctx.device) as peak:
            report = engine.load(ctx.events, lambda weights: refuse_before_loading(ctx, engine, weights))
            ctx.device.synchronize()
        seconds = ctx.clock.now() - start
        ctx.ledger.charge("weights", report.bytes)
        ctx.metrics.update(
            bytes=report.bytes,
            parameters=report.parameters,
            files=report.files,
            loader=report.loader,
            dtype=report.dtype,
            peak_bytes=peak.above_bytes,
            bytes_per_s=int(report.bytes / seconds) if seconds else None,
            made_here=made,
        )
        ctx.state.put(ENGINE, engine)
        what = f"{format_size(report.bytes)}, {report.parameters:,} parameters in {report.dtype}, by {report.loader}"
        return f"{what}, configuration and tokenizer made here" if made and report.loader == "dummy" else what


def _makers(resolve: Resolver) -> Callable[[str], ModelMaker]:
    return lambda name: cast(ModelMaker, resolve("models", name)())
