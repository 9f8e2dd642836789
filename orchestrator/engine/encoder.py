"""Calling a model's encoders: items in, rows for the encoder cache out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from orchestrator.engine.encoder_cache import EncoderCache
from orchestrator.engine.encoder_calls import encoder_call
from orchestrator.errors import StageError
from orchestrator.modality.base import MediaInputs


class Encoder:
    """The encoders of one model.

    Args:
        model: a transformers model with `get_image_features` and the like.
        micro_batch: items of the largest size in one call, until `set_micro_batch` says otherwise.
        deepstack: outputs of inner layers that the decoder wants beside the last one's (DeepStack).
        pin: see `Device`.
    """

    def __init__(
        self,
        model: Any,
        torch_device: str,
        micro_batch: int,
        deepstack: int,
        pin: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> None:
        self._model, self._torch_device, self._pin = model, torch_device, pin
        self._micro_batch, self._deepstack = micro_batch, deepstack
        self._micro_batches: dict[str, int] = {}
        self._most_tokens: dict[str, int] = {}
        self._largest: dict[str, int] = {}
        """Rows of output of the largest item so far, by modality; a profile begins with the largest of all."""

    def set_micro_batch(self, items: Mapping[str, int], most_tokens: Mapping[str, int]) -> None:
        """What one call takes from now on, by modality: items, and rows of output where one item can be cut."""
        self._micro_batches.update(items)
        self._most_tokens = dict(most_tokens)

    def divisible(self, item: MediaInputs) -> bool:
        """Whether an item is a batch of pictures to the encoder, each of equally many outputs: then it can be cut.

        An encoder that takes more than pixels (sizes, grids, masks) puts pictures together in some way of its own.
        """
        return len(self._pictures(item)) > 1

    def _pictures(self, item: MediaInputs) -> Sequence[torch.Tensor] | torch.Tensor:
        """The pictures that an item is to the encoder; none where it is something else."""
        arguments = self._arguments([item])
        pixels = next(iter(arguments.values())) if len(arguments) == 1 else None
        if pixels is None or pixels.ndim != 4 or not len(pixels) or item.num_embeds % len(pixels):
            return ()
        return pixels

    @torch.inference_mode()
    def encode(self, items: Sequence[MediaInputs], encoder: EncoderCache) -> None:
        """Encode items, a micro-batch a call, each into its rows of the encoder cache.

        Raises:
            StageError: the encoder gave another number of rows than the processor made room for, or nothing that
                could be such rows.
        """
        for batch in self._batches(items):
            if self._is_cut(batch):
                self._encode_in_pieces(batch[0], encoder)
                continue
            sizes = [item.num_embeds for item in batch]
            output = self._encode(batch[0].modality, self._arguments(batch), sum(sizes))
            for item, rows in zip(batch, torch.split(output, sizes), strict=True):
                encoder.write(item.content_hash, rows)

    def _batches(self, items: Sequence[MediaInputs]) -> Iterator[list[MediaInputs]]:
        """Neighbours that one encoder call can take together."""
        batch: list[MediaInputs] = []
        for item in items:
            if batch and not self._has_room(batch, item):
                yield batch
                batch = []
            batch.append(item)
            self._largest[item.modality] = max(self._largest.get(item.modality, 0), item.num_embeds)
        if batch:
            yield batch

    def _has_room(self, batch: Sequence[MediaInputs], item: MediaInputs) -> bool:
        if _shape(batch[0]) != _shape(item):
            return False
        most = self._micro_batches.get(item.modality, self._micro_batch)
        if len(batch) < most:
            return True
        # Pictures cost the same whoever's they are: small items may be as many as make up the largest ones.
        rows = most * self._largest[item.modality]
        rows = min(rows, self._most_tokens.get(item.modality, rows))
        together = (*batch, item)
        return sum(each.num_embeds for each in together) <= rows and all(len(self._pictures(each)) for each in together)

    def _is_cut(self, batch: Sequence[MediaInputs]) -> bool:
        most = self._most_tokens.get(batch[0].modality)
        return most is not None and len(batch) == 1 and batch[0].num_embeds > most and self.divisible(batch[0])

    def _encode_in_pieces(self, item: MediaInputs, encoder: EncoderCache) -> None:
        ((name, pixels),) = self._arguments([item]).items()
        each = item.num_embeds // len(pixels)
        pieces = torch.split(pixels, max(1, self._most_tokens[item.modality] // each))
        first = 0
        for piece in pieces:
            rows = each * len(piece)
            encoder.write(item.content_hash, self._encode(item.modality, {name: piece}, rows), first)
            first += rows

    def _arguments(self, batch: Sequence[MediaInputs]) -> dict[str, torch.Tensor]:
        """What the encoder takes of items whose tensors have equal shapes but for the first size; on the host."""
        takes = inspect.signature(encoder_call(self._model, batch[0].modality)).parameters
        names = [name for name in batch[0].tensors if name in takes]
        if len(batch) == 1:
            return {name: batch[0].tensors[name] for name in names}
        return {name: torch.cat([item.tensors[name] for item in batch]) for name in names}

    def _encode(self, modality: str, arguments: Mapping[str, torch.Tensor], rows: int) -> torch.Tensor:
        """Outputs (rows, (1 + deepstack) * hidden size)."""
        call = encoder_call(self._model, modality)
        output = call(**{name: self._to_device(each) for name, each in arguments.items()}, return_dict=True)
        for name in ("pooler_output", *(["deepstack_features"] if self._deepstack else [])):
            if getattr(output, name, None) is None:
                raise StageError(f"{type(self._model).__name__}.{call.__name__} gives no {name}")
        layers = [output.pooler_output, *(output.deepstack_features if self._deepstack else ())]
        features = [_flat(layer) for layer in layers]
        if features[0].shape[0] != rows:
            raise StageError(f"the encoder gave {features[0].shape[0]} rows where the prompt has room for {rows}")
        return torch.cat(features, dim=-1) if len(features) > 1 else features[0]

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """As the encoder takes it. Nobody waits for the copy, so that the next micro-batch is sent while one runs."""
        typed = tensor.to(self._model.dtype) if tensor.is_floating_point() else tensor
        if typed.device.type != "cpu":
            return typed
        return self._pin(typed).to(self._torch_device, non_blocking=True)


def _flat(features: Any) -> torch.Tensor:
    """(rows, hidden size) of one tensor of any number of sizes, or of one for each item."""
    parts = [features] if isinstance(features, torch.Tensor) else list(features)
    flat = [part.flatten(0, -2) for part in parts]
    return torch.cat(flat) if len(flat) > 1 else flat[0]


def _shape(item: MediaInputs) -> tuple[Any, ...]:
    """What must be equal for items to share an encoder call."""
    return item.modality, *((name, tensor.shape[1:], tensor.dtype) for name, tensor in sorted(item.tensors.items()))
