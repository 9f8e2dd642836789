"""From a configuration to a model on the device and all that serving needs to know of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from orchestrator import checkpoint as checkpoints
from orchestrator.config import Config
from orchestrator.device.base import Device
from orchestrator.engine import build, families
from orchestrator.engine.attention.base import AttentionBackend
from orchestrator.engine.base import KVSpec, WeightsReport
from orchestrator.engine.inputs import PromptBuilder
from orchestrator.engine.placeholders import placeholders, refuse_without
from orchestrator.engine.positions import RopeIndex
from orchestrator.engine.runner import ModelRunner
from orchestrator.engine.weights.base import model_bytes
from orchestrator.errors import ConfigError
from orchestrator.events import Events

Resolve = Callable[[str, str], Any]


@dataclass(frozen=True)
class Prepared:
    """What is known of a model before its weights are read."""

    found: checkpoints.Checkpoint
    what: build.Description
    backend: AttentionBackend
    kv_spec: KVSpec
    max_model_len: int
    processor_identity: str


@dataclass(frozen=True)
class Loaded:
    """What exists once weights are on the device."""

    what: build.Description
    model: Any
    runner: ModelRunner
    prompts: PromptBuilder
    rope_index: RopeIndex | None
    report: WeightsReport


def prepare(config: Config, device: Device, resolve: Resolve, cache_dir: Path) -> Prepared:
    """Find the checkpoint, and refuse what cannot be served.

    Raises:
        UserError: the checkpoint, the device or an option cannot work; names it.
    """
    ranks = config.engine.tensor_parallel_size
    if ranks != 1:
        raise ConfigError.of("engine.tensor_parallel_size", "this engine runs on one device; give 1", ranks)
    found = checkpoints.locate(config.model, make=lambda name: resolve("models", name)(), cache_dir=cache_dir)
    checkpoints.check(found, config.model, device.dtypes)
    what = build.describe(found, config)
    families.refuse_unsupported(what.config)
    max_model_len = families.resolve_max_model_len(what.config, config.scheduler.max_model_len)
    spec = _kv_spec(what, config)
    backend = _backend(what, spec, max_model_len, config, device, resolve)
    for modality, limit in config.mm.limit_per_prompt.model_dump().items():
        if limit:
            refuse_without(modality, what.config, what.processor, what.model_class)
    identity = build.processor_identity(found.folder, config.mm.processor_kwargs)
    return Prepared(found, what, backend, spec, max_model_len, identity)


def load(
    prepared: Prepared,
    config: Config,
    device: Device,
    resolve: Resolve,
    events: Events,
    admit: Callable[[int], None] | None = None,
) -> Loaded:
    """Put the weights on the device.

    Args:
        admit: called with the bytes of the weights before they are read; raises if they must not be.
    """
    what = prepared.what
    model = build.on_meta(what)
    if admit is not None:
        admit(model_bytes(model))
    traits = families.traits(model)
    prompts = _prompts(what, config, traits)
    loader, files = build.fill(model, prepared.found, what, config, resolve, device.torch_device, events)
    micro_batch = 1 if config.encoder.micro_batch == "auto" else config.encoder.micro_batch
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Loaded(
        what=what,
        model=model,
        runner=ModelRunner(model, prepared.backend, device.torch_device, traits, micro_batch, device.pin),
        prompts=prompts,
        rope_index=RopeIndex(model) if traits.axes > 1 else None,
        report=WeightsReport(model_bytes(model), parameters, files, loader, what.dtype_name),
    )


def _kv_spec(what: build.Description, config: Config) -> KVSpec:
    name = what.dtype_name if config.kv.dtype == "auto" else config.kv.dtype
    return families.kv_spec(what.config, name, getattr(torch, name).itemsize)


def _backend(
    what: build.Description, spec: KVSpec, max_model_len: int, config: Config, device: Device, resolve: Resolve
) -> AttentionBackend:
    return build.attention_backend(
        config.engine.attention,
        resolve,
        device=torch.device(device.torch_device).type,
        dtype=what.dtype_name,
        head_size=spec.head_dim,
        block_size=config.kv.block_size,
        needs=families.attention_needs(what.config, max_model_len),
    )


def _prompts(what: build.Description, config: Config, traits: families.Traits) -> PromptBuilder:
    marks = placeholders(what.config, what.processor, what.model_class)
    return PromptBuilder(
        what.processor, marks.texts, marks.embed_ids, config.mm, whole_runs=traits.both_ways, apart=marks.apart
    )
