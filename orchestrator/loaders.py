"""What is known of the built-in loaders of weights by their names: to ask their classes takes importing torch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from orchestrator.errors import ConfigError

_FIELD = "weights.loader"
_OF_FILES = frozenset({"safetensors", "transformers", "fastsafetensors"})
_OF_NATIVE_FILES = frozenset({"transformers", "fastsafetensors"})
"""Those that read no other layout than transformers' own."""
_PACKAGES = {"fastsafetensors": "fastsafetensors"}
"""Loader -> the package that it needs besides those that every start needs."""


def refuse_loader(loader: str, *, files: bool, original: Path | None = None) -> None:
    """Refuse a loader that cannot load a model; nothing is said of one that is not built in.

    Args:
        files: whether the model has weight files.
        original: its folder, where the layout is its authors' own.

    Raises:
        ConfigError: names the loader and what would work.
    """
    if loader in _OF_FILES and not files:
        raise ConfigError.of(_FIELD, "reads files, and model.load_format=dummy has none; give auto or dummy", loader)
    if loader in _OF_NATIVE_FILES and original is not None:
        raise ConfigError.of(_FIELD, f"does not read the layout of {original}; give auto or safetensors", loader)
    package = _PACKAGES.get(loader)
    if package is not None and find_spec(package) is None:
        raise ConfigError.of(_FIELD, f"needs a package that is not here; install `{package}`, or give auto", loader)
