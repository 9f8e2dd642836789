"""`mm.processor_kwargs`: which options a processor knows, and putting them to work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.errors import ConfigError, Problem, near_miss

PARTS = {
    "text_kwargs": "tokenizer",
    "images_kwargs": "image_processor",
    "audio_kwargs": "feature_extractor",
    "videos_kwargs": "video_processor",
}
"""What transformers calls the options of each part of a processor, and the part."""


def apply_options(processor: Any, options: Mapping[str, Any]) -> None:
    """Make `options` the processor's own, so that each call and each count of tokens heeds them.

    An option goes to every part that knows it, or, given inside `images_kwargs` and the like, to that part.

    Raises:
        ConfigError: options that no part knows, with the near miss, or with a value that the part refuses.
    """
    if not options:
        return
    known = {group: names for group, names in _known(processor).items() if names}
    chosen: dict[str, dict[str, Any]] = {}
    problems = []
    for name, value in options.items():
        if name in known and isinstance(value, Mapping):
            problems += [_unknown(f"{name}.{sub}", sub, known[name]) for sub in value if sub not in known[name]]
            chosen.setdefault(name, {}).update(value)
            continue
        groups = [group for group, names in known.items() if name in names]
        if not groups:
            problems.append(_unknown(name, name, {*known, *(other for names in known.values() for other in names)}))
        for group in groups:
            chosen.setdefault(group, {})[name] = value
    if problems:
        raise ConfigError(problems)
    for group, values in chosen.items():
        _apply(processor, group, values)


def _known(processor: Any) -> dict[str, set[str]]:
    """The names of each group: those of the processor's own signature and those of the part that it has."""
    own = getattr(getattr(processor, "valid_processor_kwargs", None), "__annotations__", {})
    names = {}
    for group, part_name in PARTS.items():
        part = getattr(processor, part_name, None)
        of_part = getattr(getattr(part, "valid_kwargs", None), "__annotations__", {})
        declared = getattr(own.get(group), "__annotations__", {}) if part is not None else {}
        names[group] = {*of_part, *declared}
    return names


def _unknown(path: str, name: str, known: set[str]) -> Problem:
    return Problem(f"mm.processor_kwargs.{path}", f"the model's processor has no such option; {near_miss(name, known)}")


def _apply(processor: Any, group: str, values: dict[str, Any]) -> None:
    """Set the options twice: on the part, which counts tokens by its attributes, and among the processor's defaults,
    which a call puts above the part's attributes."""
    part = getattr(processor, PARTS[group])
    _refuse_values(part, values)
    for name, value in values.items():
        setattr(part, name, value)
    setattr(processor, group, {**getattr(processor, group, {}), **values})


def _refuse_values(part: Any, values: dict[str, Any]) -> None:
    from huggingface_hub.dataclasses import validate_typed_dict
    from huggingface_hub.errors import StrictDataclassFieldValidationError

    schema = getattr(part, "valid_kwargs", None)
    if schema is None:
        return
    for name, value in values.items():
        try:
            validate_typed_dict(schema, {name: value})
        except StrictDataclassFieldValidationError as error:
            why = str(error.__cause__ or error).strip().splitlines()[-1].strip()
            field = f"mm.processor_kwargs.{name}"
            raise ConfigError.of(field, f"the model's processor refuses it: {why}", value) from None
