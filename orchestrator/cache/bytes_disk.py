"""How diskcache keeps keys and values, without pickle."""

from __future__ import annotations

import re
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from orchestrator.errors import CacheError

_MODE_BINARY = 2  # diskcache's number for bytes in a file of their own
_VALUE_FILE = re.compile(r"[0-9a-f]{2}/[0-9a-f]{2}/[0-9a-f]{28}\.val")


@dataclass(frozen=True)
class ForeignKey:
    """A key that this cache did not write, as it stands in the database, so that its row can be deleted."""

    key: Any
    raw: Any


class BytesDisk:
    """Replaces every method of `diskcache.Disk` that pickles, unpickles, or follows a file name from the database.

    Keys are text, values are bytes, and each value is a file of its own.
    """

    def __init__(self, directory: str, **_: Any) -> None:
        self._directory = Path(directory)

    def put(self, key: str | ForeignKey) -> tuple[Any, Any]:
        return (key.key, key.raw) if isinstance(key, ForeignKey) else (key, True)

    def get(self, key: Any, raw: Any) -> str | ForeignKey:
        return key if raw == 1 and isinstance(key, str) else ForeignKey(key, raw)

    def store(self, value: bytes, read: bool, key: Any = None) -> tuple[int, int, str, None]:
        name, path = self.filename()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(path, "xb") as file:  # noqa: PTH123
                file.write(value)
        except BaseException:
            self.remove(name)
            raise
        return len(value), _MODE_BINARY, name, None

    def fetch(self, mode: Any, filename: Any, value: Any, read: bool) -> Any:
        file = open_value(self._directory, mode, filename)
        if read:
            return file
        with file:
            return file.read()

    def filename(self, key: Any = None, value: Any = None) -> tuple[str, str]:
        name = secrets.token_hex(16)
        name = f"{name[:2]}/{name[2:4]}/{name[4:]}.val"
        return name, str(self._directory / name)

    def remove(self, file_path: Any) -> None:
        path = self._inside(file_path)
        if path is not None:
            with suppress(OSError):
                path.unlink()

    def _inside(self, name: Any) -> Path | None:
        return _path_of_value(self._directory, name)


def open_value(directory: Path, mode: Any, filename: Any) -> BufferedReader:
    """The file that a row of the database names.

    Raises:
        CacheError: this cache does not write such rows.
        OSError: there is no such file.
    """
    path = _path_of_value(directory, filename)
    if mode != _MODE_BINARY or path is None:
        raise CacheError("it is of a kind that this cache does not write")
    if not stat.S_ISREG(path.stat().st_mode):
        raise CacheError("its value is not a file")
    return path.open("rb")


def _path_of_value(directory: Path, name: Any) -> Path | None:
    """None for a name that could lead out of the folder."""
    return directory / name if isinstance(name, str) and _VALUE_FILE.fullmatch(name) else None
