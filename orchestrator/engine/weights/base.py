"""What every way of filling a model needs: restore what no checkpoint holds, check the result."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, cast

import torch

from orchestrator.checkpoint import Checkpoint
from orchestrator.config import WeightsConfig
from orchestrator.device.base import Device
from orchestrator.engine.weights.slabs import own_tensors
from orchestrator.errors import CheckpointError
from orchestrator.events import Progress
from orchestrator.loaders import refuse_loader

_SHOWN = 5
_MOVED_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Buffers that older checkpoints hold and the models now compute."""


class WeightsLoader(Protocol):
    """Fills a model that was built on the meta device."""

    def load(
        self,
        model: torch.nn.Module,
        checkpoint: Checkpoint,
        *,
        device: Device,
        dtype: torch.dtype,
        seed: int,
        progress: Progress,
        options: WeightsConfig,
    ) -> int:
        """Put every parameter and buffer of `model` on `device`, tied where the model ties, in evaluation mode.

        Args:
            model: a transformers `PreTrainedModel` on the meta device, built in `dtype`.
            checkpoint: where the weights are.
            device: opened.
            dtype: the element type that the model was built in; parts that the model keeps in float32 stay so.
            seed: for loaders that make weights.
            progress: advanced in bytes, `checkpoint.total_bytes` in all; without files, `model_bytes(model)`.
            options: of the configuration's node `weights`; a loader takes what it understands.

        Returns:
            The number of files read.

        Raises:
            CheckpointError: names the tensors that are missing, unused, cut off or of another shape.
        """


def refuse_unreadable(checkpoint: Checkpoint, loader: str) -> None:
    """Refuse a checkpoint that a loader has nothing to read from, or cannot read.

    Raises:
        ConfigError: names the loader and what would work.
    """
    original = checkpoint.folder if checkpoint.is_original else None
    refuse_loader(loader, files=bool(checkpoint.weight_files), original=original)


def model_bytes(model: torch.nn.Module) -> int:
    """Bytes of parameters and buffers, tied ones once; works on the meta device."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def tie(model: torch.nn.Module) -> None:
    """Make tied names one tensor, as the model's configuration says; on the meta device it costs nothing."""
    cast(Any, model).tie_weights(recompute_mapping=False)


@torch.no_grad()
def finish(model: torch.nn.Module, filled: Iterable[torch.Tensor]) -> None:
    """Compute what no checkpoint holds, by the model's own initialisation, and check that nothing was forgotten.

    Rotary frequencies, position ids and the like are buffers outside the state dict. transformers computes them in
    `_init_weights`, which leaves alone whatever is marked as filled; this is how `from_pretrained` restores them too.

    Raises:
        CheckpointError: a tensor is still on the meta device; names it.
    """
    for tensor in filled:
        cast(Any, tensor)._is_hf_initialized = True
    cast(Any, model).initialize_weights()
    model.eval()
    if left := sorted(_on_meta(model)):
        raise CheckpointError(
            f"{type(model).__name__}: no memory was given to {listed(left)}; this model cannot be loaded"
        )


def _on_meta(model: torch.nn.Module) -> Iterator[str]:
    for prefix, module in model.named_modules():
        for name, value in (*own_tensors(module), *vars(module).items()):
            if isinstance(value, torch.Tensor) and value.is_meta:
                yield f"{prefix}.{name}" if prefix else name


def refuse_leftovers(model: torch.nn.Module, checkpoint: Checkpoint, missing: list[str], unused: list[str]) -> None:
    """Refuse a checkpoint that is not this model's, but for what the model says may be absent or left over.

    Args:
        missing: names in the model that the checkpoint does not fill.
        unused: names in the checkpoint, as the model would call them, that the model does not have.
    """
    own = cast(Any, model)
    missing = _without(missing, own._keys_to_ignore_on_load_missing or ())
    unused = _without(unused, (*(own._keys_to_ignore_on_load_unexpected or ()), *_MOVED_BUFFERS))
    if not missing and not unused:
        return
    parts = []
    if missing:
        parts.append(f"{len(missing)} of the model's tensors are not in it: {listed(missing, near=unused)}")
    if unused:
        parts.append(
            f"{len(unused)} of its tensors are not in the model: {listed(unused, near=list(model.state_dict()))}"
        )
    raise CheckpointError(
        f"{checkpoint.folder}: does not fit {type(model).__name__}: {'; '.join(parts)}; give the checkpoint that "
        "belongs to this config.json"
    )


def _without(names: list[str], patterns: Iterable[str]) -> list[str]:
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]


def listed(names: list[str], near: list[str] | None = None) -> str:
    """The first few names, each with the closest of `near` if there is one, and how many more there are."""
    shown = []
    for name in names[:_SHOWN]:
        close = difflib.get_close_matches(name, near or (), n=1, cutoff=0.8)
        shown.append(f"{name} (close to {close[0]})" if close else name)
    more = len(names) - _SHOWN
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def shape_error(checkpoint: Checkpoint, name: str, found: Iterable[int], wanted: Iterable[int]) -> CheckpointError:
    """A tensor of another shape than the model's, as an error to raise."""
    return CheckpointError(
        f"{checkpoint.folder}: the tensor '{name}' has the shape {list(found)} and the model needs {list(wanted)}; "
        "give the checkpoint that belongs to this config.json"
    )
