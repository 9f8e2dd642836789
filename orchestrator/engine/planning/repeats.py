"""Layers that repeat are run once a step: what the first did to memory, the others do again.

A model's blocks are alike but for their weights. Two are taken to be alike if their modules, settings and parameters'
shapes are, and they are given the same objects and tensors of the same shapes; then they allocate the same, in the same
order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from orchestrator.engine.alike import kind_of
from orchestrator.engine.planning.host import values_of
from orchestrator.engine.planning.shapes import Shapes
from orchestrator.engine.planning.tape import Event, Outline, Tape, left_by


@dataclass(frozen=True)
class _Run:
    """What a layer did: its events, and each result as an argument's place or as memory with an outline."""

    events: list[Event]
    results: list[tuple[int, Outline]]
    is_tuple: bool


class Repeats:
    """Stands in the `forward` of layers."""

    def __init__(self, tape: Tape, shapes: Shapes) -> None:
        self._tape, self._shapes = tape, shapes
        self._runs: dict[Any, _Run | None] = {}

    def stand_in(self, model: torch.nn.Module) -> None:
        """From now on, in every layer of the model's lists."""
        for module in model.modules():
            if isinstance(module, torch.nn.ModuleList) and len(module) > 1:
                for layer in module:
                    layer.forward = self._standing_in(layer, kind_of(layer))

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """Forget what layers did in earlier steps: objects that they were given are gone."""
        self._runs.clear()
        try:
            yield
        finally:
            self._runs.clear()

    def _standing_in(self, layer: torch.nn.Module, kind: Any) -> Callable[..., Any]:
        original = layer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            key = (kind, _outline(args), tuple((name, _outline(value)) for name, value in sorted(kwargs.items())))
            run = self._runs.get(key)
            if run is not None:
                return self._again(run)
            if key in self._runs:
                return original(*args, **kwargs)
            with self._tape.recording() as events:
                output = original(*args, **kwargs)
            self._runs[key] = self._run_of(events, output)
            return output

        return forward

    def _run_of(self, events: list[Event], output: Any) -> _Run | None:
        """None where a layer cannot be repeated: it leaves more than its results, or gives something else back."""
        outputs = output if isinstance(output, tuple) else (output,)
        if not all(isinstance(one, torch.Tensor) and one.is_meta and values_of(one) is None for one in outputs):
            return None
        numbers = [self._shapes.number_of(one) for one in outputs]
        left = left_by(events)
        if left is None or left != set(numbers) or len(left) != len(numbers):
            return None
        results = [
            (number, Outline.of(one)) for number, one in zip(numbers, outputs, strict=True) if number is not None
        ]
        return _Run(events, results, isinstance(output, tuple))

    def _again(self, run: _Run) -> Any:
        numbers = self._tape.replay(run.events)
        made = tuple(self._shapes.adopt(numbers[number], outline) for number, outline in run.results)
        return made if run.is_tuple else made[0]


def _outline(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        # A tensor whose numbers are known may decide what is computed.
        numbers = values_of(value)
        return value.size(), value.stride(), value.dtype, value.device, None if numbers is None else id(numbers)
    if isinstance(value, list | tuple):
        return tuple(map(_outline, value))
    if isinstance(value, dict):
        return tuple((name, _outline(one)) for name, one in sorted(value.items()))
    return value if isinstance(value, bool | int | float | str | type(None)) else id(value)
