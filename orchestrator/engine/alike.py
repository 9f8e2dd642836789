"""Layers of a model that are alike but for their weights."""

from __future__ import annotations

from typing import Any

import torch

_NUMBERS = frozenset({"layer_idx", "layer_id", "index"})
"""Attributes that only say which layer it is."""


def kind_of(layer: torch.nn.Module) -> Any:
    """What is equal for layers that do the same to memory: modules, settings, and parameters' shapes."""
    return tuple((name, type(module), _settings(module), _parameters(module)) for name, module in layer.named_modules())


def _settings(module: torch.nn.Module) -> Any:
    plain = (bool, int, float, str, type(None))
    return tuple(
        (name, value)
        for name, value in sorted(vars(module).items())
        if isinstance(value, plain) and name not in _NUMBERS
    )


def _parameters(module: torch.nn.Module) -> Any:
    tensors = {**module._parameters, **module._buffers}
    return tuple((name, tuple(one.shape), one.dtype) for name, one in tensors.items() if one is not None)
