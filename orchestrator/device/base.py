"""What the pipeline asks of a device. Small on purpose: a fake of it runs in a unit test."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from orchestrator.memory.snapshot import Snapshot


@dataclass(frozen=True)
class DeviceInfo:
    """What identifies a device in a record. `capability` is CUDA's, as "9.0"."""

    kind: str
    name: str
    total_bytes: int
    driver: str | None = None
    capability: str | None = None
    uuid: str | None = None


class Graph(Protocol):
    """Work that was captured once and is replayed as one launch.

    Attributes:
        outputs: what the work returned; tensors that every replay writes again.
    """

    outputs: Any

    def replay(self) -> None:
        """Do the work again on whatever its input tensors now hold."""


class Reserved(Protocol):
    """Device addresses that memory is mapped into from their beginning on."""

    def rounded(self, size: int) -> int:
        """`size` in whole pages: what mapping it takes."""

    def grow(self, size: int) -> int:
        """Map memory until the first `size` bytes have it; the bytes mapped now."""

    def tensor(self, dtype: str, shape: tuple[int, ...]) -> Any:
        """A tensor over the addresses; only what has memory may be touched."""

    def close(self) -> None:
        """Unmap everything. May be called again."""


@dataclass(frozen=True)
class HostBuffer:
    """Host memory from a page on, as a tensor of bytes and as what a file can be read into."""

    tensor: Any
    view: memoryview


class Lane(Protocol):
    """One thread's own way to the device: host buffers that it fills in turn, and copies out of them that run while
    the next one is filled. Used by the thread that entered it."""

    def buffer(self) -> HostBuffer:
        """The next buffer; waits until what it held is copied. Everything from the one before has been given by now."""

    def copy(self, target: Any, source: Any, stored: Any) -> None:
        """Copy, perhaps after this returns.

        Args:
            target: on the device, of one dimension.
            source: a part of the latest buffer, bytes.
            stored: the element type that the bytes are; `uint8` takes them as they are. Another one than the target's
                is converted there, and then the part may be no longer than the lane's scratch.
        """


@runtime_checkable
class Device(Protocol):
    """One device, opened: its context exists and its memory can be read."""

    @property
    def torch_device(self) -> str:
        """As torch names it, `cuda:0` or `cpu`."""

    @property
    def supports_graphs(self) -> bool: ...

    @property
    def dtypes(self) -> frozenset[str]:
        """Names of the element types that its kernels have."""

    @property
    def source_reason(self) -> str:
        """Why `Snapshot.source` is what it is."""

    @property
    def memory_slack_bytes(self) -> int:
        """How far a reading of this process may stray for reasons that no allocation of ours explains."""

    @property
    def library_bytes(self) -> int:
        """What libraries may take outside the allocator once their kernels run. Kept out of the allocator's cap until
        it is measured."""

    @property
    def page_bytes(self) -> int:
        """In which the allocator takes memory for a large tensor."""

    @property
    def virtual_memory_refusal(self) -> str | None:
        """Why memory cannot be mapped into reserved addresses here; None if it can."""

    def open(self) -> None:
        """Make the context. The first thing that takes memory. Called again, it makes an open device the current one of
        the calling thread."""

    def info(self) -> DeviceInfo: ...

    def snapshot(self) -> Snapshot: ...

    def process_bytes(self) -> int:
        """`Snapshot.ours_bytes` and nothing else: cheap enough to be read a hundred times a second."""

    def reset_peak(self) -> None: ...

    def empty_cache(self) -> None:
        """Give back what the allocator keeps for reuse."""

    def pin(self, tensor: Any) -> Any:
        """A host tensor's numbers where a copy of them to the device need not be waited for: in pinned memory, or as
        they are where that makes no difference."""

    def lane(self, size: int, scratch_bytes: int = 0) -> AbstractContextManager[Lane]:
        """A lane with buffers of `size` bytes and `scratch_bytes` of the device for parts that are converted; waits at
        its end for its copies."""

    def synchronize(self) -> None:
        """Wait until all work given to the device is done."""

    def limit(self, allocator_bytes: int | None) -> None:
        """Cap what the allocator may take for this start from now on; None for no cap. Other starts of the process
        keep theirs."""

    def reserve(self, size: int) -> Reserved:
        """Addresses for `size` bytes, without memory. Only where `virtual_memory_refusal` is None."""

    def graph_pool(self) -> Any:
        """Memory for graphs that may share it: those of which only one runs at a time."""

    def capture(self, work: Callable[[], Any], pool: Any) -> Graph:
        """Capture `work`; the first one of a start is run once for real before. Only where `supports_graphs`.

        Args:
            work: launches work on tensors that outlive the graph; returns tensors.
            pool: of `graph_pool`.
        """

    def close(self) -> None: ...


@runtime_checkable
class WorksAside(Protocol):
    """A device on which a thread can work while others do."""

    def aside(self) -> AbstractContextManager[None]:
        """What the calling thread does meanwhile waits for no other's work. At the end it is done, and what allocator
        and libraries kept for it is given back; what libraries kept for others goes too, and comes again."""
