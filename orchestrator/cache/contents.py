"""What a cache holds, for a person: read from the database and from headers, without torch and without writing."""

from __future__ import annotations

import os
import sqlite3
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.cache.index import Index, Row
from orchestrator.cache.layout import OTHER_KEY, read_header
from orchestrator.errors import CacheError, UserError


@dataclass(frozen=True)
class Stored:
    """An entry as a list shows it.

    Attributes:
        bytes: on disk; 0 for one whose file cannot be opened.
        stored_at: seconds since 1970.
        about: what its writer says that it is; empty where it says nothing or cannot be read.
    """

    key: str
    bytes: int
    stored_at: float
    about: dict[str, Any]


class Contents:
    """The entries of the cache in `folder`, oldest first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "entries"

    def entries(self) -> list[Stored]:
        """
        Raises:
            UserError: the database cannot be read.
        """
        return [self._stored(row) for row in self._rows()]

    def faults(self) -> dict[str, str]:
        """Reads all of every entry; by key, what is wrong with those that a start would not use.

        Raises:
            UserError: the database cannot be read.
        """
        found = {row.key: self._fault(row) for row in self._rows()}
        return {key: fault for key, fault in found.items() if fault is not None}

    def _rows(self) -> list[Row]:
        try:
            return Index(self.folder).rows()
        except (sqlite3.Error, OSError) as error:
            raise UserError(f"the cache in {self.folder.parent} cannot be read ({error})") from None

    def _stored(self, row: Row) -> Stored:
        size, about = 0, {}
        with suppress(CacheError):
            file = row.open(self.folder)
            if file is not None:
                with file:
                    size = os.fstat(file.fileno()).st_size
                    about = read_header(file, checked=False).meta.get("about", {})
        return Stored(row.key, size, row.stored_at, about if isinstance(about, dict) else {})

    def _fault(self, row: Row) -> str | None:
        try:
            file = row.open(self.folder)
            if file is None:
                return "its file is gone"
            with file:
                return None if read_header(file).key == row.key else OTHER_KEY
        except CacheError as error:
            return str(error)
