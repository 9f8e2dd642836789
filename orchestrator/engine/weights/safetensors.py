"""Weights from safetensors files, in one file or many, straight to where the model needs them."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch

from orchestrator.checkpoint import Checkpoint
from orchestrator.engine.weights.base import allocate, finish, refuse_leftovers, shape_error, tie
from orchestrator.engine.weights.names import Assignment, Conversion, assign
from orchestrator.engine.weights.reader import TensorReader
from orchestrator.errors import CheckpointError
from orchestrator.events import Progress
from orchestrator.tensorfile import TensorEntry


class SafetensorsLoader:
    """Reads every byte once. Names and layouts are mapped as transformers' `from_pretrained` maps them."""

    @torch.no_grad()
    def load(
        self,
        model: torch.nn.Module,
        checkpoint: Checkpoint,
        *,
        device: str,
        dtype: torch.dtype,
        seed: int,
        progress: Progress,
    ) -> int:
        """Fill `model`; see `WeightsLoader.load`."""
        tie(model)
        assignment = assign(model, checkpoint.tensors)
        _check_before(model, checkpoint, assignment)
        allocate(model, device, dtype)
        with TensorReader(progress) as reader:
            filling = _Filling(model, checkpoint, reader)
            for entry, name in assignment.direct:
                filling.fill(entry, name)
            for conversion in assignment.conversions:
                filling.convert(conversion)
        refuse_leftovers(model, checkpoint, _missing(model, filling.names), [])
        finish(model, filling.tensors())
        return len(checkpoint.weight_files)


def _check_before(model: torch.nn.Module, checkpoint: Checkpoint, assignment: Assignment) -> None:
    """Everything that can be known from the headers, before a byte of weights is read."""
    # What a conversion gives is known only when it is done, so with one the missing names are checked afterwards.
    filled = {name for _, name in assignment.direct}
    missing = [] if assignment.conversions else _missing(model, filled)
    refuse_leftovers(model, checkpoint, missing, assignment.unused)
    known = model.state_dict()
    for entry, name in assignment.direct:
        if entry.shape != tuple(known[name].shape):
            raise shape_error(checkpoint, entry.name, entry.shape, known[name].shape)


def _missing(model: torch.nn.Module, filled: set[str]) -> list[str]:
    tensors = model.state_dict(keep_vars=True)
    done = {id(tensor) for name, tensor in tensors.items() if name in filled}
    return [name for name, tensor in tensors.items() if id(tensor) not in done]


class _Filling:
    """A model that is being filled: which names are done."""

    def __init__(self, model: torch.nn.Module, checkpoint: Checkpoint, reader: TensorReader) -> None:
        self._model, self._checkpoint, self._reader = model, checkpoint, reader
        self._targets: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
        self._done: dict[int, str] = {}
        self.names: set[str] = set()

    def tensors(self) -> list[torch.Tensor]:
        return [self._targets[name] for name in self.names]

    def fill(self, entry: TensorEntry, name: str) -> None:
        target = self._targets[name]
        if id(target) in self._done:
            self._fill_twin(entry, name)
        else:
            self._reader.read_into(entry, target)
        self._mark(name)

    def _fill_twin(self, entry: TensorEntry, name: str) -> None:
        """The model ties two names and the checkpoint has a tensor for each: as `from_pretrained` does, the tie holds
        only if they are equal."""
        other = self._targets[name]
        if name in self.names:
            raise CheckpointError(
                f"{self._checkpoint.folder}: two tensors are meant for '{name}', one is '{entry.name}'"
            )
        value = self._reader.read(entry, other.device, other.dtype)
        if torch.equal(value, other):
            return
        path, _, attribute = name.rpartition(".")
        self._targets[name] = torch.nn.Parameter(value, requires_grad=False)
        setattr(self._model.get_submodule(path), attribute, self._targets[name])

    def convert(self, conversion: Conversion) -> None:
        """Read what goes in, let transformers convert it, copy what comes out."""
        wanted = self._targets[conversion.target]
        for entry, pattern in conversion.sources:
            read = partial(self._reader.read, entry, wanted.device, wanted.dtype)
            conversion.converter.add_tensor(conversion.target, entry.name, pattern, cast(Any, read))
        try:
            made = conversion.converter.convert(
                conversion.target, model=cast(Any, self._model), config=cast(Any, self._model).config
            )
        except (RuntimeError, ValueError, IndexError, KeyError) as error:
            names = ", ".join(entry.name for entry, _ in conversion.sources[:3])
            raise CheckpointError(
                f"{self._checkpoint.folder}: the tensors {names} cannot be made into '{conversion.target}': {error}"
            ) from error
        for name, value in made.items():
            self._put(name, value[0] if isinstance(value, list) else value)

    def _put(self, name: str, value: torch.Tensor) -> None:
        target = self._targets.get(name)
        if target is None:
            refuse_leftovers(self._model, self._checkpoint, [], [name])
            return
        if target.shape != value.shape:
            raise shape_error(self._checkpoint, name, value.shape, target.shape)
        target.copy_(value)
        self._mark(name)

    def _mark(self, name: str) -> None:
        self.names.add(name)
        self._done[id(self._targets[name])] = name
