"""From a configuration to a model on the device and all that serving needs to know of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from orchestrator import checkpoint as checkpoints
from orchestrator.beside import Beside, begin_or_do
from orchestrator.config import Config
from orchestrator.device.base import Device
from orchestrator.engine import build, families
from orchestrator.engine.attention.base import AttentionBackend
from orchestrator.engine.base import KVSpec, WeightsReport
from orchestrator.engine.inputs import PromptBuilder
from orchestrator.engine.originals.native import natively
from orchestrator.engine.positions import RopeIndex
from orchestrator.engine.prompting import Prompting, read_prompting
from orchestrator.engine.runner import ModelRunner
from orchestrator.engine.weights.base import model_bytes
from orchestrator.errors import ConfigError
from orchestrator.events import Events
from orchestrator.sources import identity_of

Resolve = Callable[[str, str], Any]


@dataclass(frozen=True)
class Prepared:
    """What is known of a model before its weights are read; `model` has shapes and no bytes, and `prompting` may have
    to be waited for."""

    found: checkpoints.Checkpoint
    what: build.Description
    backend: AttentionBackend
    kv_spec: KVSpec
    max_model_len: int
    processor_identity: str
    model: Any
    traits: families.Traits
    prompting: Callable[[], Prompting]

    @property
    def identity(self) -> dict[str, Any]:
        """See `RemembersSteps.plan_identity`."""
        return {
            "checkpoint": self.found.identity,
            "class": self.what.model_class.__qualname__,
            "dtype": self.what.dtype_name,
            "attention": self.backend.name,
            "attention_class": identity_of(type(self.backend)),
        }


@dataclass(frozen=True)
class Loaded:
    """What exists once weights are on the device."""

    what: build.Description
    model: Any
    runner: ModelRunner
    prompting: Prompting
    rope_index: RopeIndex | None
    report: WeightsReport

    @property
    def prompts(self) -> PromptBuilder:
        return self.prompting.builder


def prepare(
    config: Config, device: Device, resolve: Resolve, cache_dir: Path, beside: Beside | None = None
) -> Prepared:
    """Find the checkpoint, and refuse what cannot be served.

    Args:
        beside: where the processor is read while the weights are; what is wrong with it is then said by whoever waits.

    Raises:
        UserError: the checkpoint, the device or an option cannot work; names it.
    """
    ranks = config.engine.tensor_parallel_size
    if ranks != 1:
        raise ConfigError.of("engine.tensor_parallel_size", "this engine runs on one device; give 1", ranks)
    found = checkpoints.locate(config.model, make=lambda name: resolve("models", name)(), cache_dir=cache_dir)
    checkpoints.check(found, config.model, device.dtypes)
    if found.is_original:
        found = natively(found, cache_dir)
    what = build.describe(found, config)
    families.refuse_unsupported(what.config)
    max_model_len = families.resolve_max_model_len(what.config, config.scheduler.max_model_len)
    spec = _kv_spec(what, config)
    backend = _backend(what, spec, max_model_len, config, device, resolve)
    identity = build.processor_identity(found.described_in, config.mm.processor_kwargs)
    model = build.on_meta(what)
    traits = families.traits(model)
    folder = found.described_in
    prompting = begin_or_do(beside, "processor", lambda: read_prompting(folder, what, config, traits))
    return Prepared(found, what, backend, spec, max_model_len, identity, model, traits, prompting)


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
    what, model, traits = prepared.what, prepared.model, prepared.traits
    if admit is not None:
        admit(model_bytes(model))
    start = time.monotonic()
    loader, files = build.fill(model, prepared.found, what, config, resolve, device, events)
    device.synchronize()
    seconds = time.monotonic() - start
    micro_batch = 1 if config.encoder.micro_batch == "auto" else config.encoder.micro_batch
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Loaded(
        what=what,
        model=model,
        runner=ModelRunner(model, prepared.backend, device.torch_device, traits, micro_batch, device.pin),
        prompting=prepared.prompting(),
        rope_index=RopeIndex(model) if traits.axes > 1 else None,
        report=WeightsReport(model_bytes(model), parameters, files, loader, what.dtype_name, seconds),
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
