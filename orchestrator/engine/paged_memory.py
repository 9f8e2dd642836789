"""An engine's paged memory: the KV cache, the pool of its blocks, and the graphs that hold its addresses."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.device.base import Device
from orchestrator.engine.base import CapturedGraph, KVSpec
from orchestrator.engine.encoder_cache import EncoderCache
from orchestrator.engine.graphs import DecodeGraphs
from orchestrator.engine.kv_cache import BlockPool, KVCache
from orchestrator.engine.runner import ModelRunner


class PagedMemory:
    """Comes into being in two steps, in either order: graphs are captured, blocks get memory.

    Args:
        keep: whether addresses are reserved first, so that graphs survive until the blocks get memory. Otherwise graphs
            that are captured before the cache exists are captured over the padding block alone, and dropped with it.
    """

    def __init__(self, device: Device, spec: KVSpec, block_size: int, max_model_len: int, *, keep: bool) -> None:
        self._device, self._spec, self._block_size = device, spec, block_size
        self._max_model_len, self._keep = max_model_len, keep
        self._cache: KVCache | None = None
        self._graphs: DecodeGraphs | None = None
        self.pool = BlockPool(0)

    @property
    def cache(self) -> KVCache | None:
        """The KV cache, once requests can use it."""
        return self._cache if self.pool.num_blocks else None

    @property
    def graphs(self) -> DecodeGraphs | None:
        return self._graphs

    def padding(self) -> KVCache:
        """A cache whose padding block can be used: what dummy steps write to."""
        return self._cache or KVCache.padding_only(self._spec, self._block_size, self._device.torch_device)

    def bytes_for(self, num_blocks: int) -> int:
        """What `allocate` takes in all for so many usable blocks: memory comes in whole pages."""
        if self._keep:
            return self._reserved_cache().bytes_for(num_blocks)
        size, page = (num_blocks + 1) * self._spec.bytes_per_block(self._block_size), self._device.page_bytes
        return -(-size // page) * page

    def capture(self, runner: ModelRunner, encoder: EncoderCache, sizes: Sequence[int]) -> list[CapturedGraph]:
        """Capture decode graphs of these sizes in place of those there are; none where they cannot be captured."""
        self._graphs = None
        if not self._device.supports_graphs or not runner.graph_safe:
            return []
        cache = self._reserved_cache() if self._keep else self.padding()
        graphs = DecodeGraphs(self._device, runner, cache, encoder, self._max_model_len)
        captured = graphs.capture(sizes)
        self._graphs = graphs if captured else None
        return captured

    def _reserved_cache(self) -> KVCache:
        if self._cache is None:
            most = self._device.info().total_bytes // self._spec.bytes_per_block(self._block_size)
            self._cache = KVCache.reserve(self._spec, most, self._block_size, self._device)
        return self._cache

    def allocate(self, num_blocks: int) -> int:
        """Give memory to `num_blocks` usable blocks and the padding block; bytes of all of them."""
        if self._keep:
            cache = self._reserved_cache()
            cache.grow(num_blocks)
        else:
            # The old cache goes first, so that two are never there together, and with it the graphs that read it.
            self._cache = self._graphs = None
            self._device.empty_cache()
            cache = KVCache.allocate(self._spec, num_blocks, self._block_size, self._device.torch_device)
        self._cache, self.pool = cache, BlockPool(num_blocks)
        return self.bytes_for(num_blocks)

    def close(self) -> None:
        """Give everything back. May be called again."""
        self._graphs = None
        if self._cache is not None:
            self._cache.close()
        self._cache, self.pool = None, BlockPool(0)
