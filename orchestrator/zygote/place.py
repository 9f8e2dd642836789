"""Where the import server of an environment listens. Only its owner can get there."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import UserError

_READ_AT_IMPORT = (
    *("CUDA_", "NVIDIA_", "NCCL_", "GOMP_", "KMP_", "MKL_", "OMP_", "OPENBLAS_", "GOTO_", "GLIBC_", "MALLOC_", "LD_"),
    *("HF_", "HUGGING", "TOKENIZERS_", "TRANSFORMERS_", "SAFETENSORS_", "USE_", "TORCH", "PYTORCH", "TRITON", "PYTHON"),
    *("HOME", "TMPDIR", "XDG_CACHE_HOME", "LANG", "LC_"),
)
"""What variables begin with that Python and libraries read once. A server and its starts have the same of these."""
_READ_LATER = frozenset({"CUDA_VISIBLE_DEVICES"})
_LONGEST = 107
"""Bytes in the address of a socket."""


@dataclass(frozen=True)
class Place:
    """The files of one server."""

    socket: Path

    @property
    def lock(self) -> Path:
        return self.socket.with_suffix(".lock")

    @property
    def log(self) -> Path:
        return self.socket.with_suffix(".log")


def place_of(environment: Mapping[str, str]) -> Place:
    """Where the server of this Python, this package and such an environment is.

    Raises:
        UserError: the folder is not this user's alone, or there is none on this system.
    """
    what = [sys.executable, sys.version, str(Path(__file__).resolve()), sorted(deciding(environment).items())]
    name = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:12]
    socket = folder(environment) / f"{name}.sock"
    if len(os.fsencode(socket)) > _LONGEST:
        raise UserError(f"{socket} is too long a name for a socket; set XDG_RUNTIME_DIR to a shorter folder")
    return Place(socket)


class OwnFile:
    """A file that lies there now, told from another of the same name: a folder of temporary files may be emptied at any
    time, and then have one of another server."""

    def __init__(self, path: Path) -> None:
        self._path, self._found = path, _found(path)

    @property
    def is_there(self) -> bool:
        return self._found is not None and _found(self._path) == self._found

    def remove(self) -> None:
        if self.is_there:
            self._path.unlink(missing_ok=True)


def _found(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def deciding(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables in which a start and its server must agree."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_IMPORT) and name not in _READ_LATER
    }


def folder(environment: Mapping[str, str]) -> Path:
    """The folder of all servers of this user, made if it is not there.

    Raises:
        UserError: somebody else can get into it.
    """
    if sys.platform != "linux":
        raise UserError(f"the import server needs Linux, and this is {sys.platform}; python -m orchestrator starts")
    given = environment.get("XDG_RUNTIME_DIR")
    path = Path(given) / "orchestrator" if given else Path(tempfile.gettempdir()) / f"orchestrator-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        # Not what a link leads to: whoever made the link could turn it later.
        found = path.lstat()
    except OSError as error:
        raise UserError(
            f"cannot use {path} for the import server: {error.strerror}; XDG_RUNTIME_DIR moves it"
        ) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UserError(
            f"{path} is not a folder of this user alone, so no import server is used; XDG_RUNTIME_DIR moves it"
        )
    return path
