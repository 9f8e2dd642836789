"""A model filled from a checkpoint: which tensor goes where, which are one, which change on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, cast

import torch

from orchestrator.checkpoint import Checkpoint
from orchestrator.engine.weights.base import finish, refuse_leftovers, shape_error, tie
from orchestrator.engine.weights.jobs import Item
from orchestrator.engine.weights.names import Assignment, Conversion, assign, region, rows_short
from orchestrator.engine.weights.slabs import allocate
from orchestrator.errors import CheckpointError
from orchestrator.tensorfile import TensorEntry

_CONVERTED_SHARE = 0.02
"""Of the weights' bytes: what is read for conversions at a time."""


class Source(Protocol):
    """Where the bytes come from."""

    def fill(self, items: Sequence[Item]) -> None:
        """Read each tensor into its place, of whatever type and device that is.

        Raises:
            CheckpointError: names the file and the tensor.
        """


def fill_model(
    model: torch.nn.Module, checkpoint: Checkpoint, source: Source, *, torch_device: str, dtype: torch.dtype
) -> None:
    """Give a model on meta its memory, and fill it; every byte is read once.

    Names and layouts are mapped as transformers' `from_pretrained` maps them.

    Raises:
        CheckpointError: as `WeightsLoader.load`.
    """
    tie(model)
    assignment = assigned(model, checkpoint)
    allocate(model, torch_device, dtype, [name for _, name in assignment.direct])
    filling = _Filling(model, checkpoint, source)
    filling.fill(assignment.direct)
    filling.convert(assignment.conversions)
    refuse_leftovers(model, checkpoint, _missing(filling.targets, filling.names), [])
    finish(model, filling.tensors())


def assigned(model: torch.nn.Module, checkpoint: Checkpoint) -> Assignment:
    """Where each tensor goes in a model on meta that is tied.

    Raises:
        CheckpointError: the headers show that the checkpoint is not this model's.
    """
    known = model.state_dict(keep_vars=True)
    assignment = assign(model, known, checkpoint.tensors)
    _check_before(model, known, checkpoint, assignment)
    return assignment


def _check_before(
    model: torch.nn.Module, known: dict[str, torch.Tensor], checkpoint: Checkpoint, assignment: Assignment
) -> None:
    """Everything that can be known from the headers, before a byte of weights is read."""
    # What a conversion gives is known only when it is done, so with one the missing names are checked afterwards.
    filled = {name for _, name in assignment.direct}
    missing = [] if assignment.conversions else _missing(known, filled)
    refuse_leftovers(model, checkpoint, missing, assignment.unused)
    entries: dict[str, list[TensorEntry]] = {}
    for entry, name in assignment.direct:
        entries.setdefault(name, []).append(entry)
        wanted = tuple(region(known[name], entry).shape)
        if entry.shape != wanted:
            raise shape_error(checkpoint, entry.name, entry.shape, wanted)
    for name, parts in entries.items():
        if len(parts) > 1 and region(known[name], parts[0]) is known[name]:
            raise CheckpointError(
                f"{checkpoint.folder}: both '{parts[0].name}' and '{parts[1].name}' are meant for the model's "
                f"'{name}'; give the checkpoint that belongs to this config.json"
            )
        if rows_short(known[name], parts):
            raise shape_error(checkpoint, parts[0].name, parts[0].shape, known[name].shape)


def _missing(tensors: dict[str, torch.Tensor], filled: set[str]) -> list[str]:
    """Names that are filled neither themselves nor under a name that is tied to them."""
    done = {id(tensor) for name, tensor in tensors.items() if name in filled}
    return [name for name, tensor in tensors.items() if id(tensor) not in done]


class _Filling:
    """A model that is being filled.

    Attributes:
        targets: its tensors by name.
        names: those that are done.
    """

    def __init__(self, model: torch.nn.Module, checkpoint: Checkpoint, source: Source) -> None:
        self._model, self._checkpoint, self._source = model, checkpoint, source
        self.targets: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
        self.names: set[str] = set()

    def tensors(self) -> list[torch.Tensor]:
        return [self.targets[name] for name in self.names]

    def fill(self, direct: Sequence[tuple[TensorEntry, str]]) -> None:
        """Read what only changes its name. A tensor whose place is taken under another name waits to be compared."""
        owners: dict[int, str] = {}
        items: list[Item] = []
        twins: list[tuple[TensorEntry, str]] = []
        for entry, name in direct:
            target = self.targets[name]
            part = region(target, entry)
            owner = owners.setdefault(id(target), name)
            if owner == name:
                items.append((entry, part))
            else:
                twins.append((entry, name))
            self.names.add(name)
        self._source.fill(items)
        for entry, name in twins:
            self._fill_twin(entry, name)

    def _fill_twin(self, entry: TensorEntry, name: str) -> None:
        """The model ties two names and the checkpoint has a tensor for each: as `from_pretrained` does, the tie holds
        only if they are equal."""
        tied = self.targets[name]
        value = torch.empty_like(tied)
        self._source.fill([(entry, value)])
        if torch.equal(value, tied):
            return
        path, _, attribute = name.rpartition(".")
        self.targets[name] = torch.nn.Parameter(value, requires_grad=False)
        setattr(self._model.get_submodule(path), attribute, self.targets[name])

    def convert(self, conversions: Sequence[Conversion]) -> None:
        """Read what goes in, let transformers convert it, copy what comes out."""
        limit = int(self._checkpoint.total_bytes * _CONVERTED_SHARE)
        for group in _grouped(conversions, limit):
            values = {
                (conversion.target, entry.name): self._place_for(conversion, entry)
                for conversion in group
                for entry, _ in conversion.sources
            }
            self._source.fill(
                [
                    (entry, values[conversion.target, entry.name])
                    for conversion in group
                    for entry, _ in conversion.sources
                ]
            )
            for conversion in group:
                self._convert(conversion, values)

    def _place_for(self, conversion: Conversion, entry: TensorEntry) -> torch.Tensor:
        wanted = self.targets[conversion.target]
        return torch.empty(entry.shape, dtype=wanted.dtype, device=wanted.device)

    def _convert(self, conversion: Conversion, values: dict[tuple[str, str], torch.Tensor]) -> None:
        for entry, pattern in conversion.sources:
            value = values.pop((conversion.target, entry.name))
            conversion.converter.add_tensor(conversion.target, entry.name, pattern, cast(Any, value))
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
        target = self.targets.get(name)
        if target is None:
            refuse_leftovers(self._model, self._checkpoint, [], [name])
            return
        if target.shape != value.shape:
            raise shape_error(self._checkpoint, name, value.shape, target.shape)
        target.copy_(value)
        self.names.add(name)


def _grouped(conversions: Sequence[Conversion], limit: int) -> Iterator[list[Conversion]]:
    """Conversions in turn, as many together as read no more than `limit` bytes; at least one."""
    group: list[Conversion] = []
    size = 0
    for conversion in conversions:
        own = sum(entry.nbytes for entry, _ in conversion.sources)
        if group and size + own > limit:
            yield group
            group, size = [], 0
        group.append(conversion)
        size += own
    if group:
        yield group
