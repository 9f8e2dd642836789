"""A model with each kind of layer once: the same classes over the same weights, and little work to run."""

from __future__ import annotations

import copy
from typing import Any

import torch

from orchestrator.engine.alike import kind_of


def shortened(model: Any) -> Any:
    """Another model over the same parameters and buffers, of whose lists of layers only the first of each kind are
    left. Nothing that it does to its modules or names is seen in `model`; what it writes into tensors is."""
    return _twin(model, {})


def _twin(module: torch.nn.Module, known: dict[int, torch.nn.Module]) -> torch.nn.Module:
    if id(module) in known:
        return known[id(module)]
    twin = known[id(module)] = copy.copy(module)
    # Their own dictionaries: a model may put a tensor or a module in the place of another while it runs.
    twin._parameters, twin._buffers = dict(module._parameters), dict(module._buffers)
    children = list(module._modules.items())
    if isinstance(module, torch.nn.ModuleList):
        children = [(str(place), child) for place, child in enumerate(_one_of_each(module))]
    twin._modules = {name: None if child is None else _twin(child, known) for name, child in children}
    return twin


def _one_of_each(layers: torch.nn.ModuleList) -> list[torch.nn.Module]:
    kinds: dict[Any, torch.nn.Module] = {}
    for layer in layers:
        kinds.setdefault(kind_of(layer), layer)
    return list(kinds.values())
