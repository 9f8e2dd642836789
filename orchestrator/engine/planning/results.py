"""What operations make of tensors that have shapes alone, remembered by shapes."""

from __future__ import annotations

import sys
from typing import Any

import torch

from orchestrator.engine.planning.host import tensors
from orchestrator.errors import StageError


class PlanError(StageError):
    """What cannot be planned: the operation, and the module that calls it."""


class Results:
    """Runs operations on `meta` tensors. To ask torch each time takes ten times as long."""

    def __init__(self) -> None:
        self._outlines: dict[Any, list[tuple[Any, ...]]] = {}
        self.aliasing: set[Any] = set()
        """Operations whose results may lie in their arguments' memory."""
        self._several: set[Any] = set()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """
        Raises:
            PlanError: torch cannot tell the shapes of the results.
        """
        key = _signature(func, args, kwargs) if func not in self.aliasing else None
        outlines = self._outlines.get(key) if key is not None else None
        if outlines is not None:
            made = [torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in outlines]
            return made[0] if func not in self._several else tuple(made)
        output = self._by_torch(func, args, kwargs)
        if key is not None:
            self._remember(func, key, args, kwargs, output)
        return output

    def _remember(self, func: Any, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Note what an operation makes of tensors of these shapes."""
        made = [output] if isinstance(output, torch.Tensor) else list(output) if isinstance(output, tuple) else []
        given = {tensor.untyped_storage()._cdata for tensor in tensors((*args, *kwargs.values()))}
        fresh = all(isinstance(one, torch.Tensor) and one.is_meta for one in made)
        if not made or not fresh or any(one.untyped_storage()._cdata in given for one in made):
            self.aliasing.add(func)
            return
        if isinstance(output, tuple):
            self._several.add(func)
        self._outlines[key] = [(one.size(), one.stride(), one.dtype) for one in made]

    def _by_torch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return func(*args, **kwargs)
        # Of types that a device takes and `meta` does not, too.
        except RuntimeError as error:
            raise refusal(func, str(error).splitlines()[0]) from error


def _signature(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What decides the shapes of an operation's results; None where that cannot be told apart."""
    try:
        key = (func, *map(_outline, args), *((name, _outline(value)) for name, value in kwargs.items()))
        hash(key)
    except TypeError:
        return None
    return key


def _outline(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.size(), value.stride(), value.dtype, value.is_meta
    if isinstance(value, list | tuple):
        return tuple(map(_outline, value))
    # 1 and True and 1.0 are equal, and do not make the same type.
    return value if value is None else (value, type(value))


def refusal(func: Any, why: str) -> PlanError:
    """Why an operation cannot be planned, as an error to raise."""
    return PlanError(f"{func} in {module_above() or 'no module'} cannot be planned: {why}")


def module_above() -> str | None:
    """The class of the innermost module whose code is running."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            return type(owner).__name__
        assert frame is not None
        above = frame.f_back
        if above is None:
            return None
        frame = above
    return None
