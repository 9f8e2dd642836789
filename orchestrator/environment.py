"""What else a result depends on: versions of libraries, the source's commit, the host."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

import orchestrator

_LIBRARIES = ("torch", "torchvision", "transformers", "safetensors", "hydra-core", "pydantic", "diskcache")


def versions(driver: str | None = None) -> dict[str, str | None]:
    """Versions by name; None where there is none."""
    return {
        "python": platform.python_version(),
        "orchestrator": orchestrator.__version__,
        "git": _commit(),
        "cuda": _cuda(),
        "driver": driver,
        **{name: _version(name) for name in _LIBRARIES},
    }


def host() -> dict[str, int | str]:
    """The machine: processors that this process may use, memory in bytes, operating system."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"cores": cores, "memory_bytes": psutil.virtual_memory().total, "system": platform.platform()}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cuda() -> str | None:
    import torch

    return torch.version.cuda


def _commit() -> str | None:
    """The commit of the checkout that the package lies in; with `+` if files differ from it."""
    root = Path(orchestrator.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        ask = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
        return subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
