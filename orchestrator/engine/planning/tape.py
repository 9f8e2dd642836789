"""What a step did to a device's memory, event after event: carried out as it happens, and again where it repeats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from orchestrator.device.plan import PlanDevice
from orchestrator.memory.allocator import Block

_TAKE, _GIVE, _LAUNCH, _WORKSPACE = range(4)
Event = tuple[int, int, int]
"""(kind, number of the memory or of a library, size or count)."""
_LIBRARIES = ("cublas", "cublaslt")


@dataclass(frozen=True)
class Outline:
    """A tensor without its memory: `elements` of its storage, and how it lies in them."""

    elements: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Outline:
        elements = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
        return cls(elements, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)


class Tape:
    """Carries events out on `device` and, while somebody records, notes them."""

    def __init__(self, device: PlanDevice) -> None:
        self._device = device
        self._blocks: dict[int, Block | None] = {}
        self._next = 0
        self._events: list[Event] = []
        self._recorders = 0

    def take(self, size: int) -> int:
        """Memory of `size` bytes; its number."""
        number = self._next
        self._next += 1
        self._blocks[number] = self._device.take(size)
        if self._recorders:
            self._events.append((_TAKE, number, size))
        return number

    def give(self, number: int) -> None:
        self._device.give(self._blocks.pop(number))
        if self._recorders:
            self._events.append((_GIVE, number, 0))

    def launched(self, count: int) -> None:
        self._device.launched(count)
        if self._recorders:
            self._events.append((_LAUNCH, 0, count))

    def use_workspace(self, library: str) -> None:
        self._device.use_workspace(library)
        if self._recorders:
            self._events.append((_WORKSPACE, _LIBRARIES.index(library), 0))

    def uncounted(self) -> AbstractContextManager[None]:
        """See `PlanDevice.uncounted`."""
        return self._device.uncounted()

    def assumed(self, what: str) -> None:
        """Note for the record what could not be known."""
        self._device.assumed.add(what)

    @contextmanager
    def recording(self) -> Iterator[list[Event]]:
        """The events of what happens meanwhile; whole once it is left."""
        self._recorders += 1
        start, recorded = len(self._events), list[Event]()
        try:
            yield recorded
            recorded += self._events[start:]
        finally:
            self._recorders -= 1
            if not self._recorders:
                self._events.clear()

    def replay(self, events: Sequence[Event]) -> dict[int, int]:
        """Do it again. New numbers of the memory that is left, by those that it had in `events`."""
        numbers: dict[int, int] = {}
        for kind, number, size in events:
            if kind == _TAKE:
                numbers[number] = self.take(size)
            elif kind == _GIVE:
                self.give(numbers.pop(number))
            elif kind == _LAUNCH:
                self.launched(size)
            else:
                self.use_workspace(_LIBRARIES[number])
        return numbers


def left_by(events: Sequence[Event]) -> set[int] | None:
    """The memory that is taken and not given back; None where memory of before is given back."""
    left: set[int] = set()
    for kind, number, _ in events:
        if kind == _TAKE:
            left.add(number)
        elif kind == _GIVE:
            if number not in left:
                return None
            left.discard(number)
    return left
