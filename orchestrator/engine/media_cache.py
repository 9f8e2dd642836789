"""Media items after the processor, kept on the host so that one that comes again costs nothing."""

from __future__ import annotations

from collections import OrderedDict

from orchestrator.modality.base import MediaInputs
from orchestrator.units import MiB


class MediaCache:
    """Items after the processor, by content; the least recently used go when `max_bytes` are passed."""

    def __init__(self, max_bytes: int = 256 * MiB) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._items: OrderedDict[str, MediaInputs] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def get(self, content_hash: str) -> MediaInputs | None:
        item = self._items.get(content_hash)
        if item is not None:
            self._items.move_to_end(content_hash)
        return item

    def put(self, item: MediaInputs) -> None:
        self._items[item.content_hash] = item
        self._bytes += item.num_bytes
        while self._bytes > self._max_bytes:
            self._bytes -= self._items.popitem(last=False)[1].num_bytes

    def clear(self) -> None:
        self._items.clear()
        self._bytes = 0
