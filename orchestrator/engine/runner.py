"""The model on the device: a step's numbers become tensors (`prepare`), run (`forward`), and give tokens (`sample`).

The three are apart because a captured graph replaces the middle one only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from orchestrator.engine.attention.base import BOTH_WAYS, AttentionBackend, AttentionMetadata, AttentionShape, Layout
from orchestrator.engine.attention.hook import IMPLEMENTATION, StepCache, register
from orchestrator.engine.attention.reference import ReferenceAttention
from orchestrator.engine.encoder import Encoder
from orchestrator.engine.encoder_cache import EncoderCache, EncoderIndex
from orchestrator.engine.families import Traits
from orchestrator.engine.head import Head
from orchestrator.engine.kv_cache import PADDING_BLOCK, Int64s, KVCache, blocks_for
from orchestrator.engine.likeliest import logprobs_of
from orchestrator.engine.sampling import Draw, draw_tokens
from orchestrator.engine.step import Chunk, Step
from orchestrator.engine.upload import Uploader
from orchestrator.modality.base import MediaInputs


@dataclass(frozen=True)
class StepInputs:
    """A flattened step of T tokens on the device.

    Attributes:
        input_ids: (T).
        positions: (1, T), or (3, 1, T) for a model with positions on three axes.
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


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class ModelRunner:
    """One model with its attention backend.

    Args:
        model: a transformers model with weights; its decoder is switched to the paged attention.
        traits: what sets the model apart from others.
        micro_batch: items in one encoder call at first.
        pin: see `Device`.
    """

    def __init__(
        self,
        model: Any,
        backend: AttentionBackend,
        torch_device: str,
        traits: Traits,
        micro_batch: int,
        pin: Callable[[torch.Tensor], torch.Tensor] = _as_it_is,
    ) -> None:
        self._model, self._backend = model, backend
        self._torch_device, self._traits = torch_device, traits
        self._upload = Uploader(torch_device, pin)
        self._exact = ReferenceAttention()
        self._encoder = Encoder(model, torch_device, micro_batch, traits.deepstack, pin)
        self._decoder, self._head = model.get_decoder(), Head(model.get_output_embeddings())
        self._embed = model.get_input_embeddings()
        register()
        self._decoder.set_attn_implementation(IMPLEMENTATION)

    @property
    def graph_safe(self) -> bool:
        """Whether a step of fixed shapes can be captured."""
        return self._backend.graph_safe

    @property
    def new_apart(self) -> bool:
        """See `AttentionBackend`."""
        return self._backend.new_apart

    @property
    def hidden_size(self) -> int:
        return int(self._embed.weight.shape[1])

    @property
    def encoder_width(self) -> int:
        """Elements of one row of the encoder cache: an embedding, and what DeepStack adds in the first layers."""
        return self.hidden_size * (1 + self._traits.deepstack)

    def execute(self, step: Step, kv_cache: KVCache, encoder: EncoderCache) -> list[tuple[int, float]]:
        """Run a step; a token and its log-probability for each chunk that samples, in order."""
        self.encode(step.encode, encoder)
        inputs = self.prepare(step, kv_cache.block_size, encoder.index)
        hidden = self.forward(inputs, kv_cache, encoder)
        return self.sample(hidden[inputs.sample_rows], step.draws)

    def prepare(self, step: Step, block_size: int, encoder: EncoderIndex) -> StepInputs:
        """Host to device."""
        ids: list[int] = []
        embed_rows: list[Int64s] = []
        encoder_rows: list[Int64s] = []
        sample_rows: list[int] = []
        for chunk in step.chunks:
            for positions, rows in _encoder_rows(chunk, encoder):
                embed_rows.append(positions - chunk.start + len(ids))
                encoder_rows.append(rows)
            ids += chunk.sequence.tokens(chunk.start, chunk.stop)
            if chunk.samples:
                sample_rows.append(len(ids) - 1)
        # Some models' placeholders lie outside the vocabulary, and what is looked up here is replaced.
        tokens, replaced = np.array(ids, np.int64), _joined(embed_rows)
        tokens[replaced] = 0
        spans = [(chunk.start, chunk.stop) for chunk in step.chunks]
        tables = [chunk.sequence.blocks[: blocks_for(chunk.stop, block_size)] for chunk in step.chunks]
        layout = Layout.of(spans, tables, block_size, [chunk.sequence.runs for chunk in step.chunks])
        at = self._host_positions(step.chunks)
        return self._inputs(layout, tokens, at, replaced, _joined(encoder_rows), np.array(sample_rows, np.int64))

    def _inputs(
        self,
        layout: Layout,
        ids: Int64s,
        positions: Int64s,
        embed_rows: Int64s,
        encoder_rows: Int64s,
        sample_rows: Int64s,
    ) -> StepInputs:
        """On the device, in one copy; `positions` are (axes, T)."""
        on_device = self._upload(ids, positions, embed_rows, encoder_rows, sample_rows, *layout.arrays)
        return StepInputs(
            input_ids=on_device[0],
            positions=on_device[1].view(*self.position_axes, -1),
            attention=layout.metadata(on_device[5:]),
            embed_rows=on_device[2],
            encoder_rows=on_device[3],
            sample_rows=on_device[4],
        )

    @property
    def position_axes(self) -> tuple[int, ...]:
        """Sizes before the tokens in this model's positions."""
        return (1,) if self._traits.axes == 1 else (self._traits.axes, 1)

    def _host_positions(self, chunks: Sequence[Chunk]) -> Int64s:
        """(axes, T) of the chunks' tokens."""
        return np.array(
            [
                np.concatenate([np.asarray(_positions(chunk, axis), dtype=np.int64) for chunk in chunks])
                for axis in range(self._traits.axes)
            ]
        )

    def encode(self, items: Sequence[MediaInputs], encoder: EncoderCache) -> None:
        """See `Encoder.encode`."""
        self._encoder.encode(items, encoder)

    def set_micro_batch(self, items: Mapping[str, int], most_tokens: Mapping[str, int]) -> None:
        """See `Encoder.set_micro_batch`."""
        self._encoder.set_micro_batch(items, most_tokens)

    def divisible(self, item: MediaInputs) -> bool:
        """See `Encoder.divisible`."""
        return self._encoder.divisible(item)

    def compile_kernels(self, block_size: int, kv_dtype: str) -> None:
        """See `Engine.compile_kernels`."""
        text = self._model.config.get_text_config()
        heads = text.num_attention_heads
        shape = AttentionShape(
            heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
            block_size=block_size,
            dtype=str(self._model.dtype).removeprefix("torch."),
            kv_dtype=kv_dtype,
        )
        self._backend.warm_up(shape, self._torch_device)
        self.choose(torch.zeros(1, self.hidden_size, dtype=self._model.dtype, device=self._torch_device))

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, kv_cache: KVCache, encoder: EncoderCache) -> torch.Tensor:
        """Hidden states (T, hidden size) of a step's tokens."""
        embeds = self._embed(inputs.input_ids)
        deepstack = self._put(embeds, inputs, encoder) if inputs.embed_rows.numel() else {}
        output = self._decoder(
            inputs_embeds=embeds.unsqueeze(0),
            position_ids=inputs.positions,
            cache=StepCache(kv_cache, self._backend_for(inputs.attention), inputs.attention),
            use_cache=False,
            **deepstack,
        )
        hidden: torch.Tensor = output.last_hidden_state
        return hidden[0]

    def _backend_for(self, meta: AttentionMetadata) -> AttentionBackend:
        """The backend, but for steps with images that look both ways where it cannot: decodes never are such steps."""
        return self._exact if meta.both_ways and BOTH_WAYS not in self._backend.abilities else self._backend

    def _put(self, embeds: torch.Tensor, inputs: StepInputs, encoder: EncoderCache) -> dict[str, Any]:
        """Encoder outputs into embeddings (T, hidden size); the decoder's arguments for what goes into later layers."""
        rows = encoder.slab.index_select(0, inputs.encoder_rows).to(embeds.dtype)
        first, *later = torch.split(rows, embeds.shape[1], dim=1)
        embeds.index_copy_(0, inputs.embed_rows, first)
        if not later:
            return {}
        mask = torch.zeros(1, embeds.shape[0], dtype=torch.bool, device=embeds.device)
        mask[0, inputs.embed_rows] = True
        return {"visual_pos_masks": mask, "deepstack_visual_embeds": later}

    @torch.inference_mode()
    def sample(self, hidden: torch.Tensor, draws: Sequence[Draw | None]) -> list[tuple[int, float]]:
        """The token after each row (rows, hidden size), with its log-probability by the model's own distribution: the
        likeliest, or drawn where the row has a draw."""
        if not hidden.shape[0]:
            return []
        return self.settle(hidden, *self.choose(hidden), draws)

    def settle(
        self, hidden: torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor, draws: Sequence[Draw | None]
    ) -> list[tuple[int, float]]:
        """As `sample`, where the likeliest tokens are known."""
        drawn = [(row, draw) for row, draw in enumerate(draws) if draw is not None]
        if drawn:
            (rows,) = self._upload(np.array([row for row, _ in drawn], np.int64))
            logits = self._head.logits(hidden[rows]).float()
            theirs = draw_tokens(logits, [draw for _, draw in drawn])
            tokens = tokens.index_copy(0, rows, theirs)
            logprobs = logprobs.index_copy(0, rows, logprobs_of(logits, theirs))
        return list(zip(tokens.tolist(), logprobs.tolist(), strict=True))

    @torch.inference_mode()
    def choose(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest tokens (rows) after each row and their log-probabilities (rows), left on the device."""
        return self._head.likeliest(hidden)

    def dummy_step(self, spans: Sequence[tuple[int, int]], kv_cache: KVCache, encoder: EncoderCache) -> None:
        """A step of sequences with those new positions, all on the padding block, every embedding taken from the
        encoder cache as far as that has rows."""
        size = kv_cache.block_size
        tables = [[PADDING_BLOCK] * blocks_for(stop, size) for _, stop in spans]
        positions = np.concatenate([np.arange(start, stop) for start, stop in spans])
        replaced = np.arange(min(len(positions), encoder.index.capacity))
        # Where images look both ways, the costliest step is one that only has them.
        runs = [[span] for span in spans] if self._traits.both_ways else ()
        inputs = self._inputs(
            Layout.of(spans, tables, size, runs),
            np.zeros(len(positions), np.int64),
            np.tile(positions, (self._traits.axes, 1)),
            replaced,
            replaced,
            np.zeros(0, np.int64),
        )
        self.forward(inputs, kv_cache, encoder)

    def dummy_logits(self, num_rows: int) -> None:
        hidden = torch.zeros(num_rows, self.hidden_size, dtype=self._model.dtype, device=self._torch_device)
        # Sorting for `top_p` and noise are what drawing takes most for.
        self.sample(hidden, [Draw(1.0, 0.5, (0, 0))] * num_rows)


def _positions(chunk: Chunk, axis: int) -> Sequence[int] | Int64s:
    axes = chunk.sequence.axes
    return np.arange(chunk.start, chunk.stop) if axes is None else axes.span(axis, chunk.start, chunk.stop)


def _encoder_rows(chunk: Chunk, encoder: EncoderIndex) -> Iterator[tuple[Int64s, Int64s]]:
    """The chunk's positions that encoder outputs take, an item at a time, each with its row in the encoder cache."""
    for item in chunk.sequence.items:
        if item.stop <= chunk.start or item.first >= chunk.stop:
            continue
        part = slice(bisect_left(item.positions, chunk.start), bisect_left(item.positions, chunk.stop))
        rows = encoder.rows(item.inputs.content_hash)[part]
        yield np.array(item.positions[part], np.int64), np.array(rows, np.int64)


def _joined(parts: Sequence[Int64s]) -> Int64s:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
