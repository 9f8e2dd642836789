"""Decode steps captured as graphs: one a batch size, over one set of input tensors that each replay reads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from orchestrator.device.base import Device, Graph
from orchestrator.engine.attention.base import AttentionMetadata
from orchestrator.engine.base import CapturedGraph
from orchestrator.engine.encoder_cache import EncoderCache
from orchestrator.engine.kv_cache import PADDING_BLOCK, KVCache, blocks_for, slots_of
from orchestrator.engine.runner import ModelRunner, StepInputs
from orchestrator.engine.step import Chunk, Step


@dataclass(frozen=True)
class _Buffers:
    """The input tensors for the largest batch; a smaller one reads their beginnings.

    A row that only pads the batch has one token, in the padding block, whose outputs nobody reads.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    query_start_loc: torch.Tensor
    sample_rows: torch.Tensor
    nothing: torch.Tensor

    @classmethod
    def make(cls, rows: int, max_blocks: int, axes: tuple[int, ...], torch_device: str) -> _Buffers:
        """
        Args:
            axes: sizes before the batch in the model's positions, such as (1,).
        """
        with torch.device(torch_device):
            return cls(
                input_ids=torch.zeros(rows, dtype=torch.int64),
                positions=torch.zeros((*axes, rows), dtype=torch.int64),
                seq_lens=torch.ones(rows, dtype=torch.int32),
                slot_mapping=torch.zeros(rows, dtype=torch.int64),
                block_tables=torch.full((rows, max_blocks), PADDING_BLOCK, dtype=torch.int32),
                query_start_loc=torch.arange(rows + 1, dtype=torch.int32),
                sample_rows=torch.arange(rows, dtype=torch.int64),
                nothing=torch.zeros(0, dtype=torch.int64),
            )

    def first(self, rows: int, max_seq_len: int) -> StepInputs:
        """A step of `rows` sequences with one new token each, of any length up to `max_seq_len`."""
        meta = AttentionMetadata(
            query_start_loc=self.query_start_loc[: rows + 1],
            seq_lens=self.seq_lens[:rows],
            block_tables=self.block_tables[:rows],
            slot_mapping=self.slot_mapping[:rows],
            max_query_len=1,
            max_seq_len=max_seq_len,
            query_starts=tuple(range(rows + 1)),
            lengths=(),
        )
        return StepInputs(
            input_ids=self.input_ids[:rows],
            positions=self.positions[..., :rows],
            attention=meta,
            embed_rows=self.nothing,
            encoder_rows=self.nothing,
            sample_rows=self.sample_rows[:rows],
        )


class DecodeGraphs:
    """Graphs over one KV cache; they are worth nothing once that is gone.

    Args:
        max_seq_len: tokens of the longest sequence.
    """

    def __init__(
        self, device: Device, runner: ModelRunner, kv_cache: KVCache, encoder: EncoderCache, max_seq_len: int
    ) -> None:
        self._device, self._runner = device, runner
        self._kv_cache, self._encoder, self._max_seq_len = kv_cache, encoder, max_seq_len
        self._graphs: dict[int, Graph] = {}
        self._buffers: _Buffers | None = None

    def capture(self, sizes: Sequence[int]) -> list[CapturedGraph]:
        """Capture batches of these sizes, the largest first, so that the others fit into its memory; with seconds and
        bytes of this process for each."""
        largest_first = sorted(set(sizes), reverse=True)
        if not largest_first:
            return []
        pool = self._device.graph_pool()
        max_blocks = blocks_for(self._max_seq_len, self._kv_cache.block_size)
        self._buffers = _Buffers.make(
            largest_first[0], max_blocks, self._runner.position_axes, self._device.torch_device
        )
        return [self._capture(size, pool) for size in largest_first]

    def _capture(self, size: int, pool: object) -> CapturedGraph:
        assert self._buffers is not None
        inputs = self._buffers.first(size, self._max_seq_len)
        before, start = self._device.snapshot().ours_bytes, time.perf_counter()

        @torch.inference_mode()
        def work() -> tuple[torch.Tensor, torch.Tensor]:
            return self._runner.choose(self._runner.forward(inputs, self._kv_cache, self._encoder))

        self._graphs[size] = self._device.capture(work, pool)
        self._device.synchronize()
        seconds = time.perf_counter() - start
        return CapturedGraph(size, seconds, max(0, self._device.snapshot().ours_bytes - before))

    def takes(self, step: Step) -> bool:
        """Whether a step is one that was captured: only decodes, and no more than the largest batch."""
        fits = len(step.chunks) <= max(self._graphs, default=0)
        return fits and not step.encode and all(chunk.decode for chunk in step.chunks)

    @torch.inference_mode()
    def execute(self, step: Step) -> list[tuple[int, float]]:
        """As `ModelRunner.execute`, for a step that `takes` accepts."""
        rows = len(step.chunks)
        size = min(size for size in self._graphs if size >= rows)
        self._fill(step.chunks, size)
        graph = self._graphs[size]
        graph.replay()
        tokens, logprobs = graph.outputs
        return list(zip(tokens[:rows].tolist(), logprobs[:rows].tolist(), strict=True))

    def _fill(self, chunks: Sequence[Chunk], size: int) -> None:
        """Write a step's numbers into the input tensors, and padding into the rows up to `size`."""
        assert self._buffers is not None
        buffers, block_size, padding = self._buffers, self._kv_cache.block_size, size - len(chunks)
        sequences = [chunk.sequence for chunk in chunks]
        slots = [slots_of(chunk.sequence.blocks, chunk.start, chunk.stop, block_size)[0] for chunk in chunks]
        ids = [sequence.output[-1] for sequence in sequences]
        _copy(buffers.input_ids, ids + [0] * padding)
        _copy(buffers.seq_lens, [chunk.stop for chunk in chunks] + [1] * padding)
        _copy(buffers.slot_mapping, slots + [0] * padding)
        positions = self._runner.positions(chunks)
        buffers.positions[..., : len(chunks)].copy_(positions)
        buffers.positions[..., len(chunks) : size].zero_()
        self._fill_tables(chunks, size)

    def _fill_tables(self, chunks: Sequence[Chunk], size: int) -> None:
        assert self._buffers is not None
        used = [chunk.sequence.blocks[: blocks_for(chunk.stop, self._kv_cache.block_size)] for chunk in chunks]
        width = max(len(blocks) for blocks in used)
        rows = [[*blocks, *[PADDING_BLOCK] * (width - len(blocks))] for blocks in used]
        rows += [[PADDING_BLOCK] * width] * (size - len(chunks))
        self._buffers.block_tables[:size, :width].copy_(torch.tensor(rows, dtype=torch.int32))


def _copy(target: torch.Tensor, values: list[int]) -> None:
    target[: len(values)].copy_(torch.tensor(values, dtype=target.dtype))
