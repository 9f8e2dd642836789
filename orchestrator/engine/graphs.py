"""Decode steps captured as graphs: one a batch size, over one set of input tensors that each replay reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from orchestrator.device.base import Device, Graph
from orchestrator.engine.attention.base import AttentionMetadata
from orchestrator.engine.base import CapturedGraph
from orchestrator.engine.encoder_cache import EncoderCache
from orchestrator.engine.kv_cache import PADDING_BLOCK, KVCache, blocks_for
from orchestrator.engine.runner import ModelRunner, StepInputs
from orchestrator.engine.step import Chunk, OpenRequest, Step


class _Buffers:
    """The input tensors for the largest batch, each with its copy on the host; a smaller one reads their beginnings.

    A row that only pads the batch has one token, in the padding block, whose outputs nobody reads.

    Args:
        axes: sizes before the batch in the model's positions, such as (1,).
    """

    def __init__(self, rows: int, max_blocks: int, axes: tuple[int, ...], device: Device) -> None:
        self._longs = rows * (2 + axes[0])
        # Lengths are half as wide as the rest, and lie behind it so that all go over in one copy.
        self._host = device.pin(torch.zeros(self._longs + -(-rows // 2), dtype=torch.int64))
        self._host_tables = device.pin(torch.full((rows, max_blocks), PADDING_BLOCK, dtype=torch.int32))
        self.tables = self._host_tables.numpy()
        self.ids, self.slots, *positions = self._host[: self._longs].numpy().reshape(2 + axes[0], rows)
        self.axes = positions
        self.lengths = self._host[self._longs :].view(torch.int32).numpy()
        self.lengths[:] = 1
        self._device = self._host.to(device.torch_device, copy=True)
        self._block_tables = self._host_tables.to(device.torch_device, copy=True)
        input_ids, slot_mapping, *_ = self._device[: self._longs].view(2 + axes[0], rows)
        self._input_ids, self._slot_mapping = input_ids, slot_mapping
        self._positions = self._device[2 * rows : self._longs].view(*axes, rows)
        self._seq_lens = self._device[self._longs :].view(torch.int32)
        with torch.device(device.torch_device):
            self._query_start_loc = torch.arange(rows + 1, dtype=torch.int32)
            self._sample_rows = torch.arange(rows, dtype=torch.int64)
            self._nothing = torch.zeros(0, dtype=torch.int64)

    def send(self, size: int, *, tables: bool) -> None:
        """Copy the host's numbers over; nothing may change them before the step's outputs are read."""
        self._device.copy_(self._host, non_blocking=True)
        if tables:
            self._block_tables[:size].copy_(self._host_tables[:size], non_blocking=True)

    def first(self, rows: int, max_seq_len: int) -> StepInputs:
        """A step of `rows` sequences with one new token each, of any length up to `max_seq_len`."""
        meta = AttentionMetadata(
            query_start_loc=self._query_start_loc[: rows + 1],
            seq_lens=self._seq_lens[:rows],
            block_tables=self._block_tables[:rows],
            slot_mapping=self._slot_mapping[:rows],
            max_query_len=1,
            max_seq_len=max_seq_len,
            query_starts=tuple(range(rows + 1)),
            lengths=(),
        )
        return StepInputs(
            input_ids=self._input_ids[:rows],
            positions=self._positions[..., :rows],
            attention=meta,
            embed_rows=self._nothing,
            encoder_rows=self._nothing,
            sample_rows=self._sample_rows[:rows],
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
        self._owners: list[OpenRequest | None] = []
        """Whose block table each row has: it never changes, because a sequence gets all its blocks at once."""

    def capture(self, sizes: Sequence[int]) -> list[CapturedGraph]:
        """Capture batches of these sizes, the largest first, so that the others fit into its memory; with seconds and
        bytes of this process for each."""
        largest_first = sorted(set(sizes), reverse=True)
        if not largest_first:
            return []
        pool = self._device.graph_pool()
        max_blocks = blocks_for(self._max_seq_len, self._kv_cache.block_size)
        self._buffers = _Buffers(largest_first[0], max_blocks, self._runner.position_axes, self._device)
        self._owners = [None] * largest_first[0]
        return list(self._captured(largest_first, pool))

    def _captured(self, sizes: Sequence[int], pool: object) -> Iterator[CapturedGraph]:
        before = self._device.snapshot().ours_bytes
        for size in sizes:
            start = time.perf_counter()
            self._graphs[size] = self._device.capture(self._work(size), pool)
            seconds = time.perf_counter() - start
            after = self._device.snapshot().ours_bytes
            yield CapturedGraph(size, seconds, max(0, after - before))
            before = after

    def _work(self, size: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        assert self._buffers is not None
        inputs = self._buffers.first(size, self._max_seq_len)

        @torch.inference_mode()
        def work() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            hidden = self._runner.forward(inputs, self._kv_cache, self._encoder)
            # Logits stay inside: kept for every size they would take gigabytes, and drawing needs some rows' only.
            return (hidden, *self._runner.choose(hidden))

        return work

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
        hidden, tokens, logprobs = (output[:rows] for output in graph.outputs)
        return self._runner.settle(hidden, tokens, logprobs, step.draws)

    def _fill(self, chunks: Sequence[Chunk], size: int) -> None:
        """Write a step's numbers into the input tensors, and padding into the rows up to `size`."""
        assert self._buffers is not None
        buffers, block_size, count = self._buffers, self._kv_cache.block_size, len(chunks)
        changed = self._own([*(chunk.sequence for chunk in chunks), *[None] * (size - count)])
        at = np.fromiter((chunk.start for chunk in chunks), np.int64, count)
        buffers.ids[:count] = [chunk.sequence.output[-1] for chunk in chunks]
        buffers.lengths[:count] = at + 1
        blocks = buffers.tables[np.arange(count), at // block_size].astype(np.int64)
        buffers.slots[:count] = blocks * block_size + at % block_size
        for axis, positions in enumerate(buffers.axes):
            positions[:count] = at
            for row, chunk in enumerate(chunks):
                if chunk.sequence.axes is not None:
                    positions[row] = chunk.sequence.axes.at(axis, chunk.start)
            positions[count:size] = 0
        buffers.ids[count:size] = buffers.slots[count:size] = 0
        buffers.lengths[count:size] = 1
        buffers.send(size, tables=changed)

    def _own(self, owners: Sequence[OpenRequest | None]) -> bool:
        """Give the first rows the block tables of these sequences; whether any has changed."""
        assert self._buffers is not None
        changed = [row for row, owner in enumerate(owners) if self._owners[row] is not owner]
        for row in changed:
            owner = self._owners[row] = owners[row]
            blocks = owner.blocks if owner is not None else ()
            self._buffers.tables[row, : len(blocks)] = blocks
            self._buffers.tables[row, len(blocks) :] = PADDING_BLOCK
        return bool(changed)
