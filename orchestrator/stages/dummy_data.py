"""Dummy data: the costliest item of each modality within the limits, through the model's processor, kept on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orchestrator.artifacts import DUMMY, ENGINE, MODEL_KNOWN
from orchestrator.beside import Beside, Coming
from orchestrator.config import Config as RootConfig
from orchestrator.engine.base import Engine
from orchestrator.modality.base import DummyBatch
from orchestrator.records import Span
from orchestrator.stage import Context, Resolver, Skipped, Stage, StageConfig
from orchestrator.stages.dummy_batch import make_batch, modalities_on
from orchestrator.startup_plan import startup_plan


class DummyDataConfig(StageConfig):
    """No options of its own: the limits are `mm`, the profiler `model.profiler`."""


class DummyData(Stage[DummyDataConfig]):
    Config = DummyDataConfig
    requires = (ENGINE,)
    provides = (DUMMY,)
    memory_knobs = ("smaller images (mm.image.max_size, mm.processor_kwargs) or mm.limit_per_prompt.image=0",)

    def __init__(self, config: DummyDataConfig) -> None:
        super().__init__(config)
        self._coming: Coming[_Made | None] = Coming()

    def begin(self, config: RootConfig, resolve: Resolver, beside: Beside) -> None:
        """Make or fetch it while the weights are read."""
        self._coming = beside.after(MODEL_KNOWN, "dummy data", _made_beside)

    def run(self, ctx: Context) -> str:
        made = self._coming.task.take() if self._coming.task is not None else None
        plan = startup_plan(ctx)
        plan.note(ctx)
        plan.say(ctx)
        if plan.learned is not None and not _asked_for_elsewhere(ctx):
            modalities_on(ctx, ctx.state.get(ENGINE))
            ctx.metrics.update(processor_calls=0, modalities={})
            raise Skipped(f"not needed: the start-up plan knows the costliest items ({plan.origin})")
        if made is None:
            batch, line = make_batch(ctx, ctx.state.get(ENGINE))
        else:
            batch, line = made.batch, made.line
            ctx.metrics.update(made.metrics)
            ctx.spans.extend(made.spans)
        ctx.state.put(DUMMY, batch)
        return line


@dataclass(frozen=True)
class _Made:
    """What was made before the stage's turn, and what is to be said of it."""

    batch: DummyBatch
    line: str
    metrics: dict[str, Any]
    spans: list[Span]


def _made_beside(known: tuple[Context, Engine]) -> _Made | None:
    """None where the start-up plan can do without."""
    ctx, engine = known[0].apart(), known[1]
    if startup_plan(ctx, engine).learned is not None and not _asked_for_elsewhere(ctx):
        return None
    batch, line = make_batch(ctx, engine)
    return _Made(batch, line, ctx.metrics, ctx.spans)


def _asked_for_elsewhere(ctx: Context) -> bool:
    """Whether another stage than the built-in profile, the only one that can do without, wants dummy data."""
    return any(
        options["use"] != "profile_run" and DUMMY in ctx.resolve("stages", options["use"]).requires
        for options in ctx.config.stages.values()
    )
