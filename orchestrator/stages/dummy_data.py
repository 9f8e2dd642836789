"""Dummy data: the costliest item of each modality within the limits, through the model's processor, kept on disk."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from orchestrator.artifacts import DUMMY, ENGINE
from orchestrator.cache import Entry, fingerprint
from orchestrator.engine.base import Engine, Media
from orchestrator.errors import StageError, UnknownNameError
from orchestrator.modality.base import DummyBatch, ItemSpec, MediaInputs, ModalityProfiler
from orchestrator.stage import Context, Stage, StageConfig

SCHEMA = 1
"""Of what is stored; a change of its meaning makes every older entry a miss."""


class DummyDataConfig(StageConfig):
    """No options of its own: the limits are `mm`, the profiler `model.profiler`."""


class DummyData(Stage[DummyDataConfig]):
    Config = DummyDataConfig
    requires = (ENGINE,)
    provides = (DUMMY,)

    def run(self, ctx: Context) -> str:
        engine = ctx.state.get(ENGINE)
        modalities = _modalities(ctx, engine)
        ctx.metrics["processor_calls"] = 0
        if not modalities:
            ctx.state.put(DUMMY, DummyBatch({}))
            ctx.metrics["modalities"] = {}
            return "text only"
        name, profiler_class = _profiler_class(ctx, engine)
        ctx.metrics["profiler"] = name
        profiler = profiler_class(engine.processor, engine.model_config, ctx.config.mm)
        found = {modality: _item(ctx, engine, profiler, name, modality) for modality in modalities}
        ctx.state.put(DUMMY, DummyBatch({modality: item for modality, (item, _) in found.items()}))
        ctx.metrics["modalities"] = {modality: facts for modality, (_, facts) in found.items()}
        return "; ".join(_line(modality, facts) for modality, (_, facts) in found.items())


def _modalities(ctx: Context, engine: Engine) -> list[str]:
    limits = ctx.config.mm.limit_per_prompt.model_dump()
    takes = engine.modalities()
    for modality, limit in limits.items():
        if limit and takes and modality not in takes:
            ctx.events.info(
                f"mm.limit_per_prompt.{modality}={limit} has no effect: this model takes {', '.join(takes)}"
            )
    return [modality for modality in takes if limits.get(modality, 0) > 0]


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


def _item(
    ctx: Context, engine: Engine, profiler: ModalityProfiler, name: str, modality: str
) -> tuple[MediaInputs, dict[str, Any]]:
    """The costliest item, from the cache or made, with what the record says of it."""
    if modality not in profiler.modalities:
        raise StageError(f"the profiler '{name}' cannot make {modality}; set mm.limit_per_prompt.{modality}=0")

    def build() -> Entry:
        with ctx.span(f"make {modality}"):
            spec = profiler.costliest(modality)
            ctx.metrics["processor_calls"] += 1
            return _entry(spec, engine.media_inputs(Media(modality, profiler.build(spec))), name)

    with ctx.span(f"fetch {modality}"):
        entry, how = ctx.cache.fetch(_key(ctx, engine, name, modality), build)
    meta = entry.meta
    item = MediaInputs(modality, meta["token_ids"], meta["embed_mask"], dict(entry.tensors), meta["content_hash"])
    size = sum(tensor.numel() * tensor.element_size() for tensor in item.tensors.values())
    return item, {"tokens": item.num_embeds, "shape": meta["shape"], "bytes": size, "cache": how}


def _entry(spec: ItemSpec, item: MediaInputs, profiler: str) -> Entry:
    if spec.tokens is not None and item.num_embeds != spec.tokens:
        raise StageError(
            f"the profiler '{profiler}' counts {spec.tokens} tokens for {spec.modality} {spec.shape}, "
            f"and the model's processor makes {item.num_embeds} of it"
        )
    meta = {
        "shape": list(spec.shape),
        "token_ids": item.token_ids,
        "embed_mask": item.embed_mask,
        "content_hash": item.content_hash,
    }
    return Entry(tensors=item.tensors, meta=meta)


def _key(ctx: Context, engine: Engine, profiler: str, modality: str) -> str:
    """Everything that the item depends on: how it is found, how it is processed, and by which libraries."""
    return fingerprint(
        {
            "schema": SCHEMA,
            "kind": "dummy",
            "modality": modality,
            "profiler": profiler,
            "processor": engine.processor_identity,
            "model_type": str(engine.model_config.model_type),
            "limits": ctx.config.mm.model_dump(),
            "libraries": {name: version(name) for name in ("transformers", "torchvision", "pillow")},
        }
    )


def _line(modality: str, facts: dict[str, Any]) -> str:
    shape = " x ".join(str(number) for number in facts["shape"])
    return f"{modality} {shape}: {facts['tokens']} tokens, cache {facts['cache']}"
