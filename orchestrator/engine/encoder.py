"""Calling a model's encoders: items in, rows for the encoder cache out."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from orchestrator.engine.encoder_cache import EncoderCache
from orchestrator.errors import StageError
from orchestrator.modality.base import MediaInputs


class Encoder:
    """The encoders of one model.

    Args:
        model: a transformers model with `get_image_features` and the like.
        micro_batch: items in one call.
        deepstack: outputs of inner layers that the decoder wants beside the last one's (DeepStack).
    """

    def __init__(self, model: Any, torch_device: str, micro_batch: int, deepstack: int) -> None:
        self._model, self._torch_device = model, torch_device
        self._micro_batch, self._deepstack = micro_batch, deepstack

    @torch.inference_mode()
    def encode(self, items: Sequence[MediaInputs], encoder: EncoderCache) -> None:
        """Encode items, a micro-batch a call, each into its rows of the encoder cache.

        Raises:
            StageError: the encoder gave another number of rows than the processor made room for, or nothing that
                could be such rows.
        """
        for batch in _micro_batches(items, self._micro_batch):
            output = self._encode(batch)
            sizes = [item.num_embeds for item in batch]
            if output.shape[0] != sum(sizes):
                raise StageError(f"the encoder gave {output.shape[0]} rows where the prompt has room for {sum(sizes)}")
            for item, rows in zip(batch, torch.split(output, sizes), strict=True):
                encoder.write(item.content_hash, rows)

    def _encode(self, batch: Sequence[MediaInputs]) -> torch.Tensor:
        """Outputs (rows, (1 + deepstack) * hidden size) of items whose tensors have equal shapes but for the first
        size."""
        call = getattr(self._model, f"get_{batch[0].modality}_features")
        takes = inspect.signature(call).parameters
        arguments = {
            name: self._to_device(torch.cat([item.tensors[name] for item in batch]))
            for name in batch[0].tensors
            if name in takes
        }
        output = call(**arguments, return_dict=True)
        for name in ("pooler_output", *(["deepstack_features"] if self._deepstack else [])):
            if getattr(output, name, None) is None:
                raise StageError(f"{type(self._model).__name__}.{call.__name__} gives no {name}")
        features = _flat(output.pooler_output)
        if not self._deepstack:
            return features
        return torch.cat([features, *(_flat(layer) for layer in output.deepstack_features)], dim=-1)

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._torch_device, self._model.dtype if tensor.is_floating_point() else tensor.dtype)


def _flat(features: Any) -> torch.Tensor:
    """(rows, hidden size) of one tensor of any number of sizes, or of one for each item."""
    parts = [features] if isinstance(features, torch.Tensor) else list(features)
    flat = [part.flatten(0, -2) for part in parts]
    return torch.cat(flat) if len(flat) > 1 else flat[0]


def _micro_batches(items: Sequence[MediaInputs], most: int) -> Iterator[list[MediaInputs]]:
    """Neighbours that one encoder call can take together."""
    batch: list[MediaInputs] = []
    for item in items:
        if batch and (len(batch) == most or _shape(batch[0]) != _shape(item)):
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def _shape(item: MediaInputs) -> tuple[Any, ...]:
    """What must be equal for items to share an encoder call."""
    return item.modality, *((name, tensor.shape[1:], tensor.dtype) for name, tensor in sorted(item.tensors.items()))
