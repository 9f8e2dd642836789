"""From the names in a checkpoint to the names in a model, by transformers' own tables of renamings and conversions."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from orchestrator.tensorfile import TensorEntry


@dataclass
class Conversion:
    """Tensors that become others together: experts that are stacked, a fused projection that is split.

    Attributes:
        target: name of the first tensor that comes out.
        converter: transformers' recipe, this conversion's own copy.
        sources: the tensors that go in, each with the pattern of the recipe that it matched.
    """

    target: str
    converter: WeightConverter
    sources: list[tuple[TensorEntry, str]] = field(default_factory=list)


@dataclass
class Assignment:
    """Where each tensor of a checkpoint goes.

    Attributes:
        direct: tensors that only change their name, with the new one, in the order of the files; those that are only
            some rows of the model's fill its `region`.
        conversions: tensors that change more than that.
        unused: names, as the model would call them, that the model does not have.
    """

    direct: list[tuple[TensorEntry, str]] = field(default_factory=list)
    conversions: list[Conversion] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)


def region(target: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """The part of a model's tensor that an entry fills: all of it, or some of its rows; a view."""
    first = entry.place.first_row if entry.place is not None else None
    return target if first is None else target[first : first + entry.shape[0]]


def rows_short(target: torch.Tensor, entries: Sequence[TensorEntry]) -> bool:
    """Whether entries that are some rows of a model's tensor leave others of it out."""
    parts = [entry for entry in entries if entry.place is not None and entry.place.first_row is not None]
    return bool(parts) and sum(entry.shape[0] for entry in parts) != target.shape[0]


def assign(model: torch.nn.Module, known: dict[str, torch.Tensor], tensors: Sequence[TensorEntry]) -> Assignment:
    """Follow `from_pretrained` in what each tensor of a checkpoint is called in `model`, a `PreTrainedModel` with the
    state dict `known`."""
    transforms = get_model_conversion_mapping(cast(Any, model))
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = cast(Any, model).base_model_prefix

    result = Assignment()
    conversions: dict[str, Conversion] = {}
    for entry in tensors:
        if entry.place is not None and entry.place.name in known:
            result.direct.append((entry, entry.place.name))
            continue
        name, pattern = rename_source_key(entry.name, renamings, converters, prefix, known)
        if name not in known and entry.name in known:
            name, pattern = entry.name, None
        if name not in known:
            result.unused.append(name)
        elif pattern is None:
            result.direct.append((entry, name))
        else:
            recipe = conversions.setdefault(name, Conversion(name, copy.deepcopy(by_pattern[pattern])))
            recipe.sources.append((entry, pattern))
    for conversion in conversions.values():
        # Experts are stacked in the order of their numbers, whatever order the files have.
        conversion.sources.sort(key=lambda source: dot_natural_key(source[0].name))
        result.conversions.append(conversion)
    return result
