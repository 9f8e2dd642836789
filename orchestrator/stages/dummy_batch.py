"""The dummy data of a start: which modalities, by which profiler, one item of each."""

from __future__ import annotations

from typing import Any

from orchestrator.engine.base import Engine
from orchestrator.errors import StageError, UnknownNameError
from orchestrator.modality.base import DummyBatch, ModalityProfiler
from orchestrator.stage import Context
from orchestrator.stages.dummy_item import DummyItem


def make_batch(ctx: Context, engine: Engine) -> tuple[DummyBatch, str]:
    """The costliest item of each modality that is on, and a line about them; details go into the stage's metrics.

    Raises:
        StageError: the profiler cannot make a modality, or counts other tokens than the processor makes.
    """
    ctx.metrics.update(processor_calls=0, modalities={})
    takes = modalities_on(ctx, engine)
    if not takes:
        return DummyBatch({}), "text only"
    name, profiler_class = _profiler_class(ctx, engine)
    limits = ctx.config.mm.limit_per_prompt.model_dump() | dict(profiler_class.items_per_prompt)
    per_prompt = {modality: limits[modality] for modality in takes if limits.get(modality, 0) > 0}
    for modality in per_prompt:
        if modality not in profiler_class.modalities:
            raise StageError(f"the profiler '{name}' cannot make {modality}; set mm.limit_per_prompt.{modality}=0")
    profiler = profiler_class(engine.processor, engine.model_config, ctx.config.mm, engine.max_model_len)
    made = {modality: DummyItem(ctx, engine, profiler, name, modality).item() for modality in per_prompt}
    most_tokens = {modality: most for modality, (_, most, _) in made.items()}
    items = {modality: item for modality, (item, _, _) in made.items()}
    ctx.metrics.update(profiler=name, modalities={modality: facts for modality, (_, _, facts) in made.items()})
    line = "; ".join(_line(modality, facts) for modality, (_, _, facts) in made.items())
    return DummyBatch(items, most_tokens, per_prompt), line


def modalities_on(ctx: Context, engine: Engine) -> list[str]:
    """What the model takes and no limit turns off; a modality of a plugin's own has no limit in the configuration. Says
    which limits have no effect."""
    limits = ctx.config.mm.limit_per_prompt.model_dump()
    takes = engine.modalities()
    for modality, limit in limits.items():
        if limit and takes and modality not in takes:
            ctx.events.info(
                f"mm.limit_per_prompt.{modality}={limit} has no effect: this model takes {', '.join(takes)}"
            )
    return [modality for modality in takes if limits.get(modality, 1) > 0]


def _profiler_class(ctx: Context, engine: Engine) -> tuple[str, type[ModalityProfiler]]:
    """By `model.profiler`; `auto` is the model type's own, or the generic one."""
    name = ctx.config.model.profiler
    if name != "auto":
        return name, ctx.resolve("profilers", name)
    model_type = str(engine.model_config.model_type)
    try:
        return model_type, ctx.resolve("profilers", model_type)
    except UnknownNameError:
        return "generic", ctx.resolve("profilers", "generic")


def _line(modality: str, facts: dict[str, Any]) -> str:
    shape = " x ".join(str(number) for number in facts["shape"])
    return f"{modality} {shape}: {facts['tokens']} tokens, cache {facts['cache']}"
