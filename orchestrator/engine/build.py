"""From a checkpoint to a model on the device, with its configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from orchestrator.checkpoint import Checkpoint
from orchestrator.config import Config
from orchestrator.device.base import Device
from orchestrator.engine.attention.base import AttentionBackend
from orchestrator.engine.weights.base import WeightsLoader, model_bytes
from orchestrator.errors import CheckpointError, ConfigError
from orchestrator.events import Events

_AUTO = {"cuda": ("triton", "reference"), "meta": ("triton", "reference")}
"""What `engine.attention=auto` may choose by kind of device (`meta` is a plan's), the fastest first; elsewhere
`reference`. Only backends that a committed record of a GPU covers (tests/gpu/records) belong here: others are there by
name."""
_LONGEST_LINE = 300
"""Characters. transformers lists every model type that it knows."""
_PROCESSOR_SUFFIXES = frozenset({".json", ".jinja", ".model", ".txt"})


@dataclass(frozen=True)
class Description:
    """A model before it has weights."""

    config: Any
    model_class: Any
    dtype: torch.dtype

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def describe(checkpoint: Checkpoint, config: Config) -> Description:
    """Read a model folder's configuration.

    Raises:
        CheckpointError: transformers cannot read it, or has no class for the model.
    """
    folder = checkpoint.described_in
    try:
        model_config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    # Of many kinds: its own, those of classes that check their fields, those of a value of another type.
    except Exception as error:
        raise CheckpointError(f"{folder}: transformers cannot read it: {first_line(error)}") from error
    name = config.model.dtype if config.model.dtype != "auto" else checkpoint.dtype
    return Description(
        config=model_config,
        model_class=_model_class(model_config, folder),
        dtype=getattr(torch, name),
    )


def on_meta(description: Description) -> Any:
    """The model with shapes and no bytes.

    Raises:
        CheckpointError: the configuration has values that its class cannot be made with.
    """
    config, model_class = description.config, description.model_class
    try:
        with torch.device("meta"):
            model = model_class._from_config(config, dtype=description.dtype, attn_implementation="sdpa")
    # Whatever a module raises that is given a size, a name or a number which makes no sense.
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise CheckpointError(
            f"{config.name_or_path}: {model_class.__name__} cannot be made from its config.json ({why}); give the "
            "config.json that belongs to the weights"
        ) from error
    return model.requires_grad_(False).eval()


def fill(
    model: Any,
    found: Checkpoint,
    what: Description,
    config: Config,
    resolve: Callable[[str, str], Any],
    device: Device,
    events: Events,
) -> tuple[str, int]:
    """Put weights into a model on meta; the loader's name and the number of files it read."""
    made = config.model.load_format == "dummy"
    name = config.weights.loader
    if name == "auto":
        name = "dummy" if made else "safetensors"
    loader: WeightsLoader = resolve("loaders", name)()
    with events.progress("load_weights", model_bytes(model) if made else found.total_bytes, "B") as progress:
        files = loader.load(
            model,
            found,
            device=device,
            dtype=what.dtype,
            seed=config.run.seed,
            progress=progress,
            options=config.weights,
        )
    return name, files


def processor_identity(folder: Path, options: dict[str, Any]) -> str:
    """A fingerprint of the files that decide what the processor makes of a prompt, and of its options."""
    digest = hashlib.sha256(json.dumps(options, sort_keys=True, default=str).encode())
    for path in sorted(folder.iterdir()):
        if path.suffix in _PROCESSOR_SUFFIXES and not path.name.endswith(".index.json"):
            digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def attention_backend(
    name: str,
    resolve: Callable[[str, str], Any],
    *,
    device: str,
    dtype: str,
    head_size: int,
    block_size: int | None = None,
    needs: frozenset[str] = frozenset(),
) -> AttentionBackend:
    """The backend of that name; `auto` is the fastest that takes such a model, among those whose kernels a committed
    record of a GPU covers.

    Raises:
        ConfigError: it does not take this device, element type, head size or block size, or lacks an ability that the
            model needs.
    """
    if name == "auto":
        candidates = (resolve("attention", known) for known in _AUTO.get(device, ("reference",)))
        found: type[AttentionBackend] = next(
            cls for cls in candidates if not (cls.refusal(device, dtype, head_size, block_size) or cls.lacks(needs))
        )
        return found()
    cls: type[AttentionBackend] = resolve("attention", name)
    refusal = cls.refusal(device, dtype, head_size, block_size) or cls.lacks(needs)
    if refusal:
        raise ConfigError.of("engine.attention", f"{refusal}; auto would work", name)
    return cls()


def _model_class(config: Any, folder: Path) -> Any:
    """By the configuration's architecture, else by what transformers maps its type to."""
    for name in getattr(config, "architectures", None) or ():
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    for auto in (transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM):
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise CheckpointError(f"{folder}: transformers has no model of type '{config.model_type}' that generates text")


def first_line(error: Exception) -> str:
    """What an error says, for a sentence about it: its first line, with the next one where that is only announced."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    line = " ".join(each.strip() for each in lines[: 2 if lines[0].endswith(":") else 1])
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}..."
