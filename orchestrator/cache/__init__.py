"""The disk cache: tensors and JSON under a fingerprint, over diskcache, and never unpickled.

Whatever is not exactly what this cache wrote is a miss and is removed. Whatever goes wrong with the folder ends the use
of the cache, not the start.
"""

from orchestrator.cache.entry import Entry, fingerprint
from orchestrator.cache.store import Cache

__all__ = ["Cache", "Entry", "fingerprint"]
