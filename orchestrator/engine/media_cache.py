"""Media items after the processor, kept on the host so that one that comes again costs nothing."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from orchestrator.modality.base import MediaInputs
from orchestrator.units import MiB


class MediaCache:
    """Items after the processor, by content; the least recently used go when `max_bytes` are passed.

    Threads may share it.
    """

    def __init__(self, max_bytes: int = 256 * MiB) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._items: OrderedDict[str, MediaInputs] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._items)

    def get(self, content_hash: str) -> MediaInputs | None:
        with self._lock:
            item = self._items.get(content_hash)
            if item is not None:
                self._items.move_to_end(content_hash)
            return item

    def put(self, item: MediaInputs) -> None:
        with self._lock:
            # Two threads may have made the same item.
            before = self._items.pop(item.content_hash, None)
            self._bytes += item.num_bytes - (before.num_bytes if before else 0)
            self._items[item.content_hash] = item
            while self._bytes > self._max_bytes:
                self._bytes -= self._items.popitem(last=False)[1].num_bytes

    def clear(self) -> None:
        with self._lock:
            self._items.clear()
            self._bytes = 0
