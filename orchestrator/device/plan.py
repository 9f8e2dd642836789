"""A device that is not there: a card's constants and torch's allocator, replayed. Knows no model and touches no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import finalize

from orchestrator.config import GpuSpec
from orchestrator.device.base import DeviceInfo, Graph, Lane, Reserved
from orchestrator.errors import DeviceOutOfMemoryError, StageError
from orchestrator.memory.allocator import LARGE_PAGE, Block, CachingAllocator
from orchestrator.memory.snapshot import Snapshot
from orchestrator.units import MiB

_PAGE = 2 * MiB
"""In which memory is mapped into reserved addresses."""
_LT_WORKSPACE = MiB
"""cuBLASLt's workspace, by torch's default for every card."""
_CAPTURE_STREAM = 1


class PlanDevice:
    """What a start on the card of `spec` would read, from what it would allocate.

    Tensors of this device are on torch's `meta`: they have shapes and no bytes. Whoever makes them says so with `take`
    and `give`, and each kernel with `launched`.

    Args:
        total_bytes: what to take for the card's total memory; None for what it has.
    """

    torch_device = "meta"
    supports_graphs = True
    source_reason = "the card's constants and torch's allocator, replayed"
    memory_slack_bytes = 2 * MiB
    library_bytes = 128 * MiB
    page_bytes = LARGE_PAGE
    virtual_memory_refusal = None

    def __init__(self, spec: GpuSpec, total_bytes: int | None = None) -> None:
        self.spec = spec
        self._total = total_bytes or spec.total_bytes
        self._allocator = CachingAllocator(spec.allocator, self._total)
        self._outside = 0
        """Held by the start and not by the allocator: context, libraries, graphs, mapped memory."""
        self._cap: int | None = None
        self._stream, self._pool = 0, None
        self._workspaces: dict[tuple[int, str], Block] = {}
        self._counts = True
        self._opened = self._captured = False
        self.assumed: set[str] = set()
        """What could not be known of a step, and was taken at its worst."""
        self.kernels = 0
        """Launched so far."""

    @property
    def dtypes(self) -> frozenset[str]:
        always = {"float32", "float16"}
        return frozenset(always | {"bfloat16"} if int(self.spec.capability.partition(".")[0]) >= 8 else always)

    def open(self) -> None:
        if not self._opened:
            self._opened = True
            self._outside += self.spec.context_bytes

    def info(self) -> DeviceInfo:
        return DeviceInfo("plan", self.spec.name, self._total, capability=self.spec.capability)

    def snapshot(self) -> Snapshot:
        allocator = self._allocator
        ours = self._outside + allocator.reserved_bytes
        return Snapshot(
            total_bytes=self._total,
            free_bytes=max(0, self._total - self.spec.driver_bytes - ours),
            ours_bytes=ours,
            allocated_bytes=allocator.allocated_bytes,
            reserved_bytes=allocator.reserved_bytes,
            peak_bytes=allocator.peak_bytes,
            peak_reserved_bytes=allocator.peak_reserved_bytes,
            source="planned",
        )

    def process_bytes(self) -> int:
        return self._outside + self._allocator.reserved_bytes

    def take(self, size: int) -> Block | None:
        """Memory for a tensor of `size` bytes, on the present stream; None where it is not counted.

        Raises:
            DeviceOutOfMemoryError: the card has no room for it, or the cap does not allow it.
        """
        if not self._counts:
            return None
        most = self._total - self.spec.driver_bytes - self._outside
        self._allocator.most_bytes = most if self._cap is None else min(most, self._cap)
        return self._allocator.allocate(size, stream=self._stream, pool=self._pool)

    def give(self, block: Block | None) -> None:
        if block is not None:
            self._allocator.free(block)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Tensors that are made meanwhile take nothing: they lie in memory that is counted elsewhere."""
        before, self._counts = self._counts, False
        try:
            yield
        finally:
            self._counts = before

    def launched(self, count: int) -> None:
        """So many kernels were launched. The first brings the libraries."""
        if not self.kernels:
            self._outside += self.spec.library_bytes
        self.kernels += count

    def use_workspace(self, library: str) -> None:
        """A call of `cublas` or `cublaslt` on the present stream, which keeps a workspace from its first call on."""
        key = (self._stream, library)
        size = self.spec.workspace_bytes if library == "cublas" else _LT_WORKSPACE
        if key not in self._workspaces and size:
            self._workspaces[key] = self._allocator.allocate(size, stream=self._stream, pool=self._pool)

    def reset_peak(self) -> None:
        self._allocator.reset_peak()

    def empty_cache(self) -> None:
        self._allocator.empty_cache()

    def pin(self, tensor: Any) -> Any:
        return tensor

    def lane(self, size: int, scratch_bytes: int = 0) -> AbstractContextManager[Lane]:
        raise StageError("a plan copies nothing")

    def synchronize(self) -> None:
        return None

    def limit(self, allocator_bytes: int | None) -> None:
        self._cap = allocator_bytes

    def reserve(self, size: int) -> Reserved:
        return _Mapped(self, size)

    def map(self, size: int) -> None:
        """Memory for addresses, past the allocator; less than nothing gives it back.

        Raises:
            DeviceOutOfMemoryError: the card has not so much left.
        """
        if size > self.snapshot().free_bytes:
            raise DeviceOutOfMemoryError(f"the card has no memory left for {size} bytes")
        self._outside += size

    def graph_pool(self) -> Any:
        return _Pool()

    def capture(self, work: Callable[[], Any], pool: Any) -> Graph:
        # Work of the same kind was captured already: running this once more first would take nothing new.
        if not self._captured:
            with self._on(_CAPTURE_STREAM, None):
                work()
        # As torch does before a capture.
        self.empty_cache()
        before = self.kernels
        with self._on(_CAPTURE_STREAM, pool):
            graph = _PlanGraph(work())
        nodes = (self.kernels - before) * self.spec.graph_node_bytes
        self._outside += nodes + (0 if self._captured else self.spec.graph_bytes)
        self._captured = True
        pool.graphs += 1
        finalize(graph, self._dropped, pool, nodes).atexit = False
        return graph

    def _dropped(self, pool: _Pool, nodes: int) -> None:
        """A graph is gone: the driver has its kernels' memory for the next one, and the last one leaves the pool."""
        self._outside -= nodes
        pool.graphs -= 1
        if not pool.graphs:
            self._allocator.leave(pool)

    @contextmanager
    def _on(self, stream: int, pool: Any) -> Iterator[None]:
        before = self._stream, self._pool
        self._stream, self._pool = stream, pool
        try:
            yield
        finally:
            self._stream, self._pool = before

    def close(self) -> None:
        return None


class _Pool:
    """Memory that graphs share, as many as there are."""

    graphs = 0


class _PlanGraph:
    def __init__(self, outputs: Any) -> None:
        self.outputs = outputs

    def replay(self) -> None:
        return None


class _Mapped:
    """Reserved addresses of the card."""

    def __init__(self, device: PlanDevice, size: int) -> None:
        self._device, self._size = device, size
        self._mapped = 0

    def rounded(self, size: int) -> int:
        return -(-size // _PAGE) * _PAGE

    def grow(self, size: int) -> int:
        missing = self.rounded(size) - self._mapped
        if missing > 0:
            self._device.map(missing)
            self._mapped += missing
        return self._mapped

    def tensor(self, dtype: str, shape: tuple[int, ...]) -> Any:
        import torch

        with self._device.uncounted():
            return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    def close(self) -> None:
        self._device.map(-self._mapped)
        self._mapped = 0
