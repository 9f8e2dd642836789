"""Numbers of the host beside tensors of the planned device, and tensors of the host that hold one number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

VALUES = "_planned_values"
"""The attribute of a tensor of the device that holds its numbers, where they are known."""


def makes_on_device(kwargs: dict[str, Any]) -> bool:
    """Whether these arguments of a factory name the planned device."""
    return kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta"


def on_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operation gives on the numbers that are known."""
    host = {**kwargs, "device": "cpu"} if makes_on_device(kwargs) else kwargs
    return func(*(_host(arg) for arg in args), **{name: _host(arg) for name, arg in host.items()})


def like(values: Any) -> Any:
    """Tensors of the device with the shapes of those of the host."""
    if isinstance(values, torch.Tensor):
        return values.to("meta")
    return type(values)(like(value) for value in values)


def _host(value: Any) -> Any:
    """An argument with what is known in the place of `meta` tensors."""
    if isinstance(value, torch.Tensor):
        return getattr(value, VALUES, value)
    if isinstance(value, list | tuple):
        return type(value)(_host(each) for each in value)
    return value


def tensors(values: Iterable[Any]) -> Iterator[Any]:
    """All that there are, in lists and tuples too."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors(value)


def is_hollow(tensor: torch.Tensor) -> bool:
    """Whether a tensor of the host is one number that is seen everywhere."""
    return not tensor.is_meta and tensor.numel() > 1 and not any(tensor.stride())


def joined(tensors: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """`torch.cat` of hollow tensors, as hollow."""
    size = list(tensors[0].shape)
    size[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return tensors[0].flatten()[0].expand(size)


def values_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The numbers of a tensor, where they are carried along."""
    found: torch.Tensor | None = getattr(tensor, VALUES, None)
    return found
