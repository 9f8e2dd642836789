"""Load the weights: find the checkpoint, build the model, put its parameters on the device."""

from __future__ import annotations

from pathlib import Path

from orchestrator.artifacts import ENGINE
from orchestrator.checkpoint import check, locate
from orchestrator.config import Config as RootConfig
from orchestrator.memory.snapshot import peak_of
from orchestrator.model_folder import HUB_ID
from orchestrator.stage import Context, Resolver, Stage, StageConfig
from orchestrator.units import format_size

DTYPES = frozenset({"float32", "float16", "bfloat16"})
"""What some device has; which this one lacks is known once it is open."""


class LoadWeightsConfig(StageConfig):
    """No options of its own: which model and how is `model` and `weights`."""


class LoadWeights(Stage[LoadWeightsConfig]):
    Config = LoadWeightsConfig
    provides = (ENGINE,)

    def check(self, config: RootConfig, resolve: Resolver) -> None:
        path, cache_dir = config.model.path, Path(config.cache.dir).expanduser()
        if path is None:
            resolve("models", config.model.name)
        elif Path(path).expanduser().exists() or not HUB_ID.fullmatch(path):
            found = locate(config.model, make=lambda name: resolve("models", name)(), cache_dir=cache_dir)
            check(found, config.model, DTYPES)

    def run(self, ctx: Context) -> str:
        engine = ctx.resolve("engines", ctx.config.engine.name)(ctx.config, ctx.device, ctx.resolve, ctx.cache.folder)
        ctx.cleanup.callback(engine.close)
        start = ctx.clock.now()
        with peak_of(ctx.device) as peak:
            report = engine.load(ctx.events)
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
        )
        ctx.state.put(ENGINE, engine)
        return f"{format_size(report.bytes)}, {report.parameters:,} parameters in {report.dtype}, by {report.loader}"
