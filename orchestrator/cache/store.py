"""The cache as the stages use it: find, build once, keep within a size, and never stop a start."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from orchestrator.cache.bytes_disk import BytesDisk
from orchestrator.cache.entry import Entry, as_read, encode
from orchestrator.cache.index import Index
from orchestrator.cache.layout import OTHER_KEY, map_tensors, read_header
from orchestrator.errors import CacheError
from orchestrator.units import format_size


class Cache:
    """Entries in `folder`, shared by all processes that use it.

    The folder is made when something is first written. A relative one is taken from where the process is now; `~` is
    not expanded.

    Args:
        max_bytes: of the values and the index together; the oldest entries make room for a new one.
        enabled: false reads and writes nothing.
        warn: called with one sentence when an entry is removed or refused, or when the cache can no longer be used.
        wait_s: seconds to wait for another process that builds the same entry.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        enabled: bool = True,
        warn: Callable[[str], None],
        wait_s: float = 600.0,
    ) -> None:
        self.folder = Path(os.path.abspath(folder))  # noqa: PTH100 - absolute() would keep a `..`
        self._max_bytes, self._warn, self._wait_s = max_bytes, warn, wait_s
        self._readable = self._writable = enabled
        self._store: Any = None

    @property
    def _entries(self) -> Path:
        return self.folder / "entries"

    @property
    def _index(self) -> Index:
        return Index(self._entries)

    def get(self, key: str) -> Entry | None:
        """The entry of `key`, or None. An entry that is not what was written is removed and said. Writes nothing else,
        so a folder that may only be read serves."""
        with self._reading():
            row = self._index.find(key) if self._readable else None
            why = None
            try:
                file = None if row is None else row.open(self._entries)
                if file is not None:
                    with file:
                        return _read(file, key)
            except CacheError as error:
                why = error
            if why is not None:
                self._warn(f"the cache entry {key} is not used: {why}; it is removed")
                self.delete(key)
        return None

    def put(self, key: str, entry: Entry) -> bool:
        """Keep `entry`; whether it was kept. One that cannot fit is refused, and said.

        Raises:
            TypeError: `entry.meta` holds what JSON cannot say.
        """
        if not self._writable:
            return False
        data = encode(key, entry)
        with self._writing():
            store = self._opened()
            with self._locked("index"):
                self._sweep(store)
                if self._make_room(store, key, len(data)):
                    return bool(store.set(key, data))
        return False

    def fetch(self, key: str, build: Callable[[], Entry]) -> tuple[Entry, Literal["hit", "miss", "off"]]:
        """The entry of `key`, built if it is not there. Of several processes that find it missing, one builds. `off`:
        built, and not kept because the cache is off or cannot be used."""
        found = self.get(key)
        if found is not None:
            return found, "hit"
        if not self._writable:
            return as_read(build()), "off"
        with self._one_builder(key):
            found = self.get(key)
            if found is not None:
                return found, "hit"
            outcome: Literal["miss", "off"] = "miss" if self._writable else "off"
            built = as_read(build())
            self.put(key, built)
            return built, outcome

    def delete(self, key: str) -> bool:
        """Whether there was an entry to delete."""
        with self._writing():
            if self._writable and self._index.exists:
                return bool(self._opened().delete(key))
        return False

    def keys(self) -> list[str]:
        """The keys of all entries, in the order in which they were first written."""
        with self._reading():
            return [row.key for row in self._index.rows()] if self._readable else []
        return []

    def entry_bytes(self, key: str) -> int | None:
        """The size of an entry on disk, or None where there is none."""
        with self._reading(), suppress(CacheError):
            row = self._index.find(key) if self._readable else None
            file = None if row is None else row.open(self._entries)
            if file is not None:
                with file:
                    return os.fstat(file.fileno()).st_size
        return None

    def close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            with suppress(Exception):
                store.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _opened(self) -> Any:
        if self._store is None:
            import diskcache  # type: ignore[import-untyped]

            if os.path.expandvars(self._entries) != str(self._entries):
                raise CacheError("its path holds the name of an environment variable, which diskcache would replace")
            disk = type("Disk", (BytesDisk, diskcache.Disk), {})
            with self._locked("index"):
                # All settings that matter are given, so that what the database says about them is not used. diskcache's
                # own culling drops ten entries at a time; a rollback journal, unlike its WAL, works over NFS.
                self._store = diskcache.Cache(
                    str(self._entries),
                    timeout=30,
                    disk=disk,
                    size_limit=self._max_bytes,
                    cull_limit=0,
                    eviction_policy="least-recently-stored",
                    statistics=0,
                    tag_index=0,
                    sqlite_journal_mode="delete",
                    disk_min_file_size=0,
                )
        return self._store

    def _sweep(self, store: Any) -> None:
        """Remove value files that no row names: a writer was killed. The caller keeps other writers out."""
        store.expire()
        if sum(1 for _ in self._entries.glob("*/*/*.val")) != len(store):
            # It warns of each thing that it mends.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                store.check(fix=True)

    def _make_room(self, store: Any, key: str, size: int) -> bool:
        index = store.volume() - store.reset("size")
        if index + size > self._max_bytes:
            self._warn(
                f"the cache entry {key} is not kept: {format_size(size)} and an index of {format_size(index)} "
                f"are more than cache.max_bytes={self._max_bytes} ({format_size(self._max_bytes)})"
            )
            return False
        oldest_first = [other for other in store if other != key]
        for victim in (*oldest_first, key):
            if store.volume() + size <= self._max_bytes:
                return True
            store.delete(victim)
        if store.volume() + size > self._max_bytes:
            store.clear()
        return True

    @contextmanager
    def _one_builder(self, key: str) -> Iterator[None]:
        with ExitStack() as stack:
            with self._writing():
                self._opened()
                stack.enter_context(self._locked(hashlib.sha256(key.encode()).hexdigest()))
            yield

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Hold a lock that the operating system drops when its holder dies."""
        from filelock import FileLock

        folder = self.folder / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{name}.lock", timeout=self._wait_s):
            yield

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._readable = self._writable = False
            self._give_up("read", error)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """What is there can still be read when nothing more can be written."""
        try:
            yield
        # A planted setting can make diskcache raise anything; none of it may end the start.
        except Exception as error:
            self._writable = False
            self._give_up("written", error)

    def _give_up(self, done: str, error: Exception) -> None:
        self.close()
        why = str(error) or type(error).__name__
        self._warn(f"the cache in {self.folder} cannot be {done} ({why}); going on without it")


def _read(file: BufferedReader, key: str) -> Entry:
    """
    Raises:
        CacheError: not exactly what was written for `key`.
    """
    header = read_header(file)
    if header.key != key:
        raise CacheError(OTHER_KEY)
    return Entry(map_tensors(file, header) if header.tensors else {}, header.meta)
