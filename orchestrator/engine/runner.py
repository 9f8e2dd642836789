"""The model on the device: a step's numbers become tensors (`prepare`), run (`forward`), and give tokens (`sample`).

The three are apart because a captured graph replaces the middle one only.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from orchestrator.engine.attention.base import AttentionBackend, AttentionMetadata
from orchestrator.engine.attention.hook import IMPLEMENTATION, StepCache, register
from orchestrator.engine.encoder_cache import EncoderCache, EncoderIndex
from orchestrator.engine.kv_cache import PADDING_BLOCK, KVCache, blocks_for
from orchestrator.engine.step import Chunk, Step
from orchestrator.errors import StageError
from orchestrator.modality.base import MediaInputs


@dataclass(frozen=True)
class StepInputs:
    """A flattened step of T tokens on the device.

    Attributes:
        input_ids: (T).
        positions: (1, T).
        embed_rows: (E), rows of the step whose embedding an encoder output replaces.
        encoder_rows: (E), where in the encoder cache each comes from.
        sample_rows: (S), rows after which a token is drawn.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionMetadata
    embed_rows: torch.Tensor
    encoder_rows: torch.Tensor
    sample_rows: torch.Tensor


class ModelRunner:
    """One model with its attention backend.

    Args:
        model: a transformers model with weights; its decoder is switched to the paged attention.
        micro_batch: items in one encoder call.
    """

    def __init__(self, model: Any, backend: AttentionBackend, torch_device: str, micro_batch: int) -> None:
        self._model, self._backend = model, backend
        self._torch_device, self._micro_batch = torch_device, micro_batch
        self._decoder, self._head = model.get_decoder(), model.get_output_embeddings()
        self._embed = model.get_input_embeddings()
        register()
        self._decoder.set_attn_implementation(IMPLEMENTATION)

    @property
    def hidden_size(self) -> int:
        return int(self._embed.weight.shape[1])

    def execute(self, step: Step, kv_cache: KVCache, encoder: EncoderCache) -> list[tuple[int, float]]:
        """Run a step; a token and its log-probability for each chunk that samples, in order."""
        self.encode(step.encode, encoder)
        inputs = self.prepare(step, kv_cache.block_size, encoder.index)
        hidden = self.forward(inputs, kv_cache, encoder)
        return self.sample(hidden[inputs.sample_rows])

    def prepare(self, step: Step, block_size: int, encoder: EncoderIndex) -> StepInputs:
        """Host to device. Positions count each sequence's tokens from 0; families with other positions differ here."""
        ids: list[int] = []
        positions: list[int] = []
        embed_rows: list[int] = []
        encoder_rows: list[int] = []
        sample_rows: list[int] = []
        for chunk in step.chunks:
            for position, row in _encoder_rows(chunk, encoder):
                embed_rows.append(len(ids) + position - chunk.start)
                encoder_rows.append(row)
            ids += chunk.sequence.tokens(chunk.start, chunk.stop)
            positions += range(chunk.start, chunk.stop)
            if chunk.samples:
                sample_rows.append(len(ids) - 1)
        spans = [(chunk.start, chunk.stop) for chunk in step.chunks]
        tables = [chunk.sequence.blocks[: blocks_for(chunk.stop, block_size)] for chunk in step.chunks]
        return StepInputs(
            input_ids=self._tensor(ids),
            positions=self._tensor(positions).unsqueeze(0),
            attention=AttentionMetadata.build(spans, tables, block_size, self._torch_device),
            embed_rows=self._tensor(embed_rows),
            encoder_rows=self._tensor(encoder_rows),
            sample_rows=self._tensor(sample_rows),
        )

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._torch_device)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, kv_cache: KVCache, encoder: EncoderCache) -> torch.Tensor:
        """Hidden states (T, hidden size) of a step's tokens."""
        embeds = self._embed(inputs.input_ids)
        if inputs.embed_rows.numel():
            embeds.index_copy_(0, inputs.embed_rows, encoder.slab.index_select(0, inputs.encoder_rows).to(embeds.dtype))
        output = self._decoder(
            inputs_embeds=embeds.unsqueeze(0),
            position_ids=inputs.positions,
            cache=StepCache(kv_cache, self._backend, inputs.attention),
            use_cache=False,
        )
        hidden: torch.Tensor = output.last_hidden_state
        return hidden[0]

    @torch.inference_mode()
    def sample(self, hidden: torch.Tensor) -> list[tuple[int, float]]:
        """The likeliest token after each row (rows, hidden size), with its log-probability."""
        if not hidden.shape[0]:
            return []
        logits = self._head(hidden).float()
        tokens = logits.argmax(-1)
        logprobs = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return list(zip(tokens.tolist(), logprobs.tolist(), strict=True))

    @torch.inference_mode()
    def encode(self, items: Sequence[MediaInputs], encoder: EncoderCache) -> None:
        """Encode items, a micro-batch a call, each into its rows of the encoder cache.

        Raises:
            StageError: the encoder gave another number of rows than the processor made room for.
        """
        for batch in _micro_batches(items, self._micro_batch):
            output = self._encode(batch)
            sizes = [item.num_embeds for item in batch]
            if output.shape[0] != sum(sizes):
                raise StageError(f"the encoder gave {output.shape[0]} rows where the prompt has room for {sum(sizes)}")
            for item, rows in zip(batch, torch.split(output, sizes), strict=True):
                encoder.write(item.content_hash, rows)

    def _encode(self, batch: Sequence[MediaInputs]) -> torch.Tensor:
        """Encoder outputs (rows, hidden size) of items whose tensors have equal shapes but for the first size."""
        call = getattr(self._model, f"get_{batch[0].modality}_features")
        takes = inspect.signature(call).parameters
        arguments = {
            name: self._to_device(torch.cat([item.tensors[name] for item in batch]))
            for name in batch[0].tensors
            if name in takes
        }
        features = call(**arguments, return_dict=True).pooler_output
        parts = [features] if isinstance(features, torch.Tensor) else list(features)
        flat = [part.flatten(0, -2) for part in parts]
        return torch.cat(flat) if len(flat) > 1 else flat[0]

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._torch_device, self._model.dtype if tensor.is_floating_point() else tensor.dtype)

    def dummy_step(self, spans: Sequence[tuple[int, int]], kv_cache: KVCache, encoder: EncoderCache) -> None:
        """A step of sequences with those new positions, all on the padding block, every embedding taken from the
        encoder cache as far as that has rows."""
        size = kv_cache.block_size
        tables = [[PADDING_BLOCK] * blocks_for(stop, size) for _, stop in spans]
        positions = [position for start, stop in spans for position in range(start, stop)]
        replaced = range(min(len(positions), encoder.index.capacity))
        inputs = StepInputs(
            input_ids=self._tensor([0] * len(positions)),
            positions=self._tensor(positions).unsqueeze(0),
            attention=AttentionMetadata.build(spans, tables, size, self._torch_device),
            embed_rows=self._tensor(replaced),
            encoder_rows=self._tensor(replaced),
            sample_rows=self._tensor([]),
        )
        self.forward(inputs, kv_cache, encoder)

    def dummy_logits(self, num_rows: int) -> None:
        hidden = torch.zeros(num_rows, self.hidden_size, dtype=self._model.dtype, device=self._torch_device)
        self.sample(hidden)


def dummy_spans(num_tokens: int, context: int, max_model_len: int, max_num_seqs: int) -> list[tuple[int, int]]:
    """New positions (start, stop) of sequences that share `num_tokens` new tokens after a context.

    As few sequences as can each have at least `context` tokens before their new ones; with a context they end at
    `max_model_len`, where it costs most. Where that would be more than `max_num_seqs`, the context is shortened, and
    tokens beyond `max_num_seqs * max_model_len`, which no step can hold, are left out.
    """
    num_tokens = min(num_tokens, max_num_seqs * max_model_len)
    room = max(1, max_model_len - context)
    count = min(-(-num_tokens // room), max_num_seqs)
    sizes = [num_tokens // count + (index < num_tokens % count) for index in range(count)]
    return [(max_model_len - size, max_model_len) if context else (0, size) for size in sizes]


def _encoder_rows(chunk: Chunk, encoder: EncoderIndex) -> Iterator[tuple[int, int]]:
    """The chunk's positions that encoder outputs take, each with its row in the encoder cache."""
    for item in chunk.sequence.items:
        if item.stop <= chunk.start or item.first >= chunk.stop:
            continue
        first, stop = bisect_left(item.positions, chunk.start), bisect_left(item.positions, chunk.stop)
        yield from zip(item.positions[first:stop], encoder.rows(item.inputs.content_hash)[first:stop], strict=True)


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
