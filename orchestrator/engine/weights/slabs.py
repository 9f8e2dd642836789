"""Memory for a model that was built on the meta device: one allocation for all parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from transformers.core_model_loading import build_glob_alternation

_ALIGNMENT = 256
"""Bytes: of what lies in a slab. Kernels ask for 16, copies are fastest from 128 on."""


def allocate(model: torch.nn.Module, device: str, dtype: torch.dtype, order: Iterable[str] = ()) -> None:
    """Replace what is on the meta device: parameters by uninitialised memory, buffers by zeros.

    Parameters are views of one slab, the sum of their bytes and at most 255 for each: hundreds of allocations would
    each be rounded, and take longer. Tensors that are shared stay shared: tied weights are never allocated twice.

    Args:
        order: names of tensors of the state dict that are to lie one after the other, as they do in the files: what
            is neighbours in both is copied in one go. The others follow.
    """
    places = _places(model, order)
    types = _element_types(model, dtype)
    new_types = {key: types(name) or tensor.dtype for key, (name, tensor) in places.items()}
    offsets, size = _layout(places, new_types)
    slab = torch.empty(size, dtype=torch.uint8, device=device)
    made: dict[int, torch.Tensor] = {
        key: _view(slab, offsets[key], old.shape, new_types[key]) for key, (_, old) in places.items()
    }
    # The old tensors stay until the end, in `places` and here: a freed one's id could be given to another.
    buffers: list[torch.Tensor] = []
    for module in model.modules():
        for name, old in own_tensors(module):
            if isinstance(old, torch.nn.Parameter):
                module._parameters[name] = cast(torch.nn.Parameter, made[id(old)])
                continue
            if id(old) not in made:
                buffers.append(old)
                made[id(old)] = _buffer(old, device)
            module._buffers[name] = made[id(old)]


def own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of a module itself, by name."""
    for tensors in (module._parameters, module._buffers):
        for name, tensor in list(tensors.items()):
            if tensor is not None:
                yield name, tensor


def _places(model: torch.nn.Module, order: Iterable[str]) -> dict[int, tuple[str, torch.nn.Parameter]]:
    """Parameters by id, each once and under its first name, in the order in which they are to lie."""
    first_names = {id(parameter): (name, parameter) for name, parameter in model.named_parameters()}
    all_names = dict(model.named_parameters(remove_duplicate=False))
    wanted = [id(all_names[name]) for name in order if name in all_names]
    return {key: first_names[key] for key in (*wanted, *first_names)}


def _layout(
    places: dict[int, tuple[str, torch.nn.Parameter]], types: dict[int, torch.dtype]
) -> tuple[dict[int, int], int]:
    """Where each parameter begins in the slab, and the slab's bytes."""
    offsets: dict[int, int] = {}
    end = 0
    for key, (_, parameter) in places.items():
        offsets[key] = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = offsets[key] + parameter.numel() * types[key].itemsize
    return offsets, end


def _view(slab: torch.Tensor, offset: int, shape: torch.Size, dtype: torch.dtype) -> torch.nn.Parameter:
    part = slab[offset : offset + shape.numel() * dtype.itemsize]
    return torch.nn.Parameter(part.view(dtype).view(shape), requires_grad=False)


def _buffer(old: torch.Tensor, device: str) -> torch.Tensor:
    return torch.zeros(old.shape, dtype=old.dtype, device=device) if old.is_meta else old.to(device)


def _element_types(model: torch.nn.Module, dtype: torch.dtype) -> Callable[[str], torch.dtype | None]:
    """A function from a parameter's name to the type that the model insists on for it, or None."""
    plan: dict[str, torch.dtype] = cast(Any, model)._get_dtype_plan(dtype)
    pattern, group_names, _ = build_glob_alternation(list(plan))

    def element_type(name: str) -> torch.dtype | None:
        match = pattern.search(name) if plan else None
        return plan[group_names[match.lastgroup or ""]] if match else None

    return element_type
