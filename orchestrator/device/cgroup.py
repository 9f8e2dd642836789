"""The limit that a control group sets on this process's memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_NO_LIMIT = 1 << 60
"""Version 1 writes "no limit" as a number near 2**63."""


def cgroup_limit(root: Path = Path("/")) -> int | None:
    """Bytes that the process's control group may use: the least limit of the group and of those around it; None if
    no limit is set. Reads version 2, then version 1.

    Args:
        root: where `/proc` and `/sys` are.
    """
    limits = [limit for file in _files(root) if (limit := _read(file)) is not None]
    return min(limits, default=None)


def _files(root: Path) -> Iterator[Path]:
    mount = root / "sys/fs/cgroup"
    for controllers, group in _groups(root):
        if controllers == "":
            yield from _upwards(mount, group, "memory.max")
        elif "memory" in controllers.split(","):
            yield from _upwards(mount / "memory", group, "memory.limit_in_bytes")


def _groups(root: Path) -> list[tuple[str, str]]:
    """(controllers, path of the group) as the kernel lists them; no controllers for version 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return [("", "/"), ("memory", "/")]
    parts = [line.split(":", 2) for line in lines]
    return [(part[1], part[2]) for part in parts if len(part) == 3]


def _upwards(mount: Path, group: str, name: str) -> Iterator[Path]:
    """The file of the group and of each around it. In a container the path may be the host's and lead nowhere; the
    mount's own file is then the one that counts."""
    inside = PurePosixPath(group.lstrip("/"))
    for each in (inside, *inside.parents):
        if ".." not in each.parts:
            yield mount / each / name


def _read(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT else None
