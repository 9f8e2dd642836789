"""Reading the cache's database without writing to it: diskcache writes when it opens one, so a folder that may only be
read could not be used."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any
from urllib.parse import quote

from orchestrator.cache.bytes_disk import open_value

_FILE = "cache.db"


@dataclass(frozen=True)
class Row:
    """An entry as the database has it. `stored_at`: seconds since 1970."""

    key: str
    stored_at: float
    mode: Any
    filename: Any

    def open(self, folder: Path) -> BufferedReader | None:
        """Its file; None if that is gone.

        Raises:
            CacheError: the row is not one that this cache writes.
        """
        try:
            return open_value(folder, self.mode, self.filename)
        except OSError:
            return None


class Index:
    """The rows of the database in `folder`, oldest first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def exists(self) -> bool:
        return (self.folder / _FILE).exists()

    def rows(self) -> list[Row]:
        return self._rows("", ())

    def find(self, key: str) -> Row | None:
        return next(iter(self._rows("AND key = ?", (key,))), None)

    def _rows(self, where: str, values: tuple[Any, ...]) -> list[Row]:
        """Keys that this cache did not write are left out."""
        if not self.exists:
            return []
        # Not `mode=ro`: that could not undo what a killed writer left half done. Where the file may not be written,
        # SQLite opens it for reading by itself.
        address = f"file:{quote(str(self.folder / _FILE))}?mode=rw"
        select = "SELECT key, store_time, mode, filename FROM Cache WHERE raw = 1 AND typeof(key) = 'text' "
        alive = "AND (expire_time IS NULL OR expire_time > ?) "
        with closing(sqlite3.connect(address, uri=True, timeout=30)) as database:
            # Another process may be making the database just now.
            if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'Cache'").fetchall():
                return []
            found = database.execute(f"{select}{alive}{where} ORDER BY rowid", (time.time(), *values)).fetchall()
        return [Row(*fields) for fields in found]
