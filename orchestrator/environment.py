"""What else a result depends on: versions of libraries, the source's commit, the host."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

import orchestrator

_LIBRARIES = (
    *("torch", "torchvision", "triton", "transformers", "tokenizers", "safetensors", "numpy", "pillow"),
    *("hydra-core", "pydantic", "diskcache", "nvidia-ml-py"),
)
_THAT_MATTER = (
    *("CUDA_", "CUBLAS_", "CUBLASLT_", "CUDNN_", "NCCL_", "NVIDIA_TF32_OVERRIDE", "PYTORCH_", "TORCH_", "TRITON_"),
    *("OMP_", "MKL_", "MALLOC_", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "ORCHESTRATOR_", "PYTHONHASHSEED"),
)
"""Beginnings of names, and whole ones: what changes which devices there are, what libraries take, where things are."""
_NEVER = ("TOKEN", "SECRET", "PASSW", "AUTH", "CREDENTIAL", "KEY")


def versions(driver: str | None = None) -> dict[str, str | None]:
    """Versions by name; None where there is none."""
    return {
        "python": platform.python_version(),
        "orchestrator": orchestrator.__version__,
        "git": _commit(),
        "cuda": _cuda(),
        "driver": driver,
        **{name: version_of(name) for name in _LIBRARIES},
    }


def variables(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment variables that change what a start does, of those that are set; never one that may be a secret.

    Args:
        environment: None for this process's.
    """
    given = os.environ if environment is None else environment
    return {
        name: value
        for name, value in sorted(given.items())
        if name.startswith(_THAT_MATTER) and not any(word in name.upper() for word in _NEVER)
    }


def host() -> dict[str, int | str]:
    """The machine: processors that this process may use, memory in bytes, operating system."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"cores": cores, "memory_bytes": psutil.virtual_memory().total, "system": platform.platform()}


@lru_cache(maxsize=64)
def version_of(name: str) -> str | None:
    """Of a distribution that is installed; None for one that is not. What is installed later counts in the next
    process, as what is imported does."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cuda() -> str | None:
    """Of torch; read from its file alone where torch is not imported yet, which takes seconds."""
    if "torch" in sys.modules:
        return _text(sys.modules["torch"].version.cuda)
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    spec = importlib.util.spec_from_file_location("_version_of_torch", Path(found.origin).parent / "version.py")
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return _text(getattr(module, "cuda", None))


def _text(value: object) -> str | None:
    return None if value is None else str(value)


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
