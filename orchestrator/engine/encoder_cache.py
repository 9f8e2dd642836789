"""Encoder outputs kept on the device: rows of one slab, handed out one by one, so that nothing fragments."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.errors import OrchestratorError

if TYPE_CHECKING:
    import torch


class EncoderCacheError(OrchestratorError):
    """An entry that was taken or let go against the rules: a defect of the caller, not of a request."""


@dataclass
class _Entry:
    rows: list[int]
    users: int = 0


@dataclass
class EncoderIndex:
    """Which rows hold which item. An entry in use stays; of the others, the least recently used goes first.

    Attributes:
        capacity: rows, one an encoder token.
    """

    capacity: int
    _free: list[int] = field(init=False)
    _entries: OrderedDict[str, _Entry] = field(init=False, default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self._free = list(range(self.capacity - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, content_hash: str) -> bool:
        return content_hash in self._entries

    @property
    def num_free(self) -> int:
        """Rows of no entry."""
        return len(self._free)

    def can_add(self, num_rows: int) -> bool:
        """Whether a new entry of `num_rows` rows fits beside those in use."""
        in_use = sum(len(entry.rows) for entry in self._entries.values() if entry.users)
        return num_rows <= self.capacity - in_use

    def add(self, content_hash: str, num_rows: int) -> list[int]:
        """Make an entry, not yet in use, evicting what is not in use as needed; its rows.

        Raises:
            EncoderCacheError: it is there already, or does not fit.
        """
        if content_hash in self._entries or not self.can_add(num_rows):
            raise EncoderCacheError(f"an item of {num_rows} rows is in the cache already or does not fit")
        for other in [key for key, entry in self._entries.items() if not entry.users]:
            if len(self._free) >= num_rows:
                break
            self._free.extend(reversed(self._entries.pop(other).rows))
        rows = [self._free.pop() for _ in range(num_rows)]
        self._entries[content_hash] = _Entry(rows)
        return rows

    def rows(self, content_hash: str) -> Sequence[int]:
        return self._entries[content_hash].rows

    def acquire(self, content_hash: str) -> None:
        """Keep an entry until it is released as often as it was acquired."""
        self._entries[content_hash].users += 1
        self._entries.move_to_end(content_hash)

    def release(self, content_hash: str) -> None:
        """Raises: EncoderCacheError: nobody uses the entry."""
        entry = self._entries.get(content_hash)
        if entry is None or not entry.users:
            raise EncoderCacheError("an item was released that nobody uses")
        entry.users -= 1

    def clear(self) -> None:
        """Drop every entry, in use or not."""
        self._entries.clear()
        self._free = list(range(self.capacity - 1, -1, -1))


class EncoderCache:
    """The slab (capacity, hidden size) and its index.

    Args:
        pin: see `Device`.
    """

    def __init__(
        self,
        tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        torch_device: str,
        pin: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> None:
        import torch

        from orchestrator.engine.upload import Uploader

        self.index = EncoderIndex(tokens)
        self._upload = Uploader(torch_device, pin)
        self.slab = torch.empty((tokens, hidden_size), dtype=dtype, device=torch_device).zero_()

    @property
    def bytes(self) -> int:
        return self.slab.numel() * self.slab.element_size()

    def write(self, content_hash: str, output: torch.Tensor, first: int = 0) -> None:
        """Put an encoder output (rows, hidden size) into the rows of its entry, from the entry's row `first` on."""
        import numpy as np

        entry = self.index.rows(content_hash)[first : first + output.shape[0]]
        (rows,) = self._upload(np.array(entry, np.int64))
        self.slab.index_copy_(0, rows, output.to(self.slab.dtype))
