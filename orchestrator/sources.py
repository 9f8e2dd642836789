"""Fingerprints of code: what was learned or made with other code is not taken over."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import orchestrator

ROOMS = ("orchestrator", "conf", "plugins")
"""What a checkout consists of, tests apart; in an installation the first has all."""
_ASIDE = {"tests", "__pycache__"}
_SUFFIXES = {".py", ".yaml", ".toml", ".json"}


def installation() -> Path:
    """The folder that the package lies in: a checkout's, or `site-packages`."""
    return Path(orchestrator.__file__).resolve().parent.parent


def checkout() -> Path | None:
    """The checkout that the package runs from; None where it is installed."""
    root = installation()
    return root if (root / "pyproject.toml").is_file() else None


def sources_hash(root: Path | None = None) -> str:
    """Of every file of a checkout: package, configuration and plugins, tests apart. None: of what runs here."""
    rooms = ROOMS if root is not None or checkout() is not None else ROOMS[:1]
    place = root or installation()
    found = (path for room in rooms for path in (place / room).rglob("*") if path.suffix in _SUFFIXES)
    return _digest(place, (path for path in found if not _ASIDE & set(path.relative_to(place).parts)))


def own_code(package: Path | None = None) -> str:
    """Of every module of a package's folder; None for this package."""
    root = package or Path(orchestrator.__file__).parent
    return _digest(root, root.rglob("*.py"))


def code_of(kind: type) -> list[str]:
    """Of the files of a class and of what it derives from, and of the other modules in their packages' folders."""
    return sorted({_neighbourhood(Path(file)) for file in _files(kind)})


def identity_of(kind: type) -> list[str]:
    """Which class it is, and what code it has."""
    return [f"{kind.__module__}:{kind.__qualname__}", *code_of(kind)]


def _files(kind: type) -> Iterable[str]:
    for each in kind.__mro__:
        try:
            yield inspect.getfile(each)
        except (TypeError, OSError):
            continue


def _neighbourhood(file: Path) -> str:
    in_package = (file.parent / "__init__.py").is_file()
    return _digest(file.parent, file.parent.glob("*.py") if in_package else (file,))


def _digest(root: Path, files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in sorted(files):
        try:
            content = _content(file)
        except OSError:
            content = b"unreadable"
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + content)
    return digest.hexdigest()


def _content(file: Path) -> bytes:
    """The SHA-256 of a file. A start asks for the same ones several times, and one from an import server inherits what
    the server knows.

    Raises:
        OSError: it cannot be read.
    """
    found = file.stat()
    return _content_of(file, found.st_ino, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=4096)
def _content_of(file: Path, _inode: int, _size: int, _modified_ns: int) -> bytes:
    return hashlib.sha256(file.read_bytes()).digest()
