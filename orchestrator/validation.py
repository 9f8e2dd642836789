"""What pydantic found wrong, one sentence a field: what is expected, and the near miss where a name was misspelt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from orchestrator.errors import ConfigError, Problem, near_miss

M = TypeVar("M", bound=BaseModel)
_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
_LIMITS = (("gt", "above"), ("ge", "at least"), ("lt", "below"), ("le", "at most"))
_NAMES = (*(name for name, _ in _LIMITS), "min_length", "max_length")


def validate(model: type[M], values: Mapping[str, Any], prefix: str = "") -> M:
    """`values` as a `model`.

    Raises:
        ConfigError: with every field that cannot work, named from `prefix` on.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(problems_of(error, prefix, model)) from None


def problems_of(error: ValidationError, prefix: str, model: type[BaseModel]) -> list[Problem]:
    """One problem a field; the members of a union, which pydantic reports one by one, become one sentence.

    Args:
        prefix: dotted path of `model` in the configuration; empty for the whole of it.
    """
    by_path: dict[tuple[str | int, ...], list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        by_path.setdefault(_path(details["loc"], model), []).append(details)
    return [_problem(path, found, prefix, model) for path, found in by_path.items()]


def annotation_at(model: type[BaseModel], path: Iterable[str | int]) -> Any:
    """What the field at `path` is declared as, optional or not; None where there is no such field."""
    declared: Any = model
    for part in path:
        declared = _step(declared, part)
        if declared is None:
            return None
    return declared


def takes_only_text(model: type[BaseModel], path: Iterable[str | int]) -> bool:
    """Whether the field at `path` is free text, so that nothing typed there can be meant as a number or a list."""
    members = _members(annotation_at(model, path))
    return str in members and not {int, float, bool} & {member for member in members if isinstance(member, type)}


def describe_field(field: FieldInfo) -> str:
    """The values that a field allows, in words."""
    return describe(_declared(field))


def describe(declared: Any, constraints: tuple[Any, ...] = ()) -> str:
    """The values that a type allows, in words: `a whole number above 0, or auto`."""
    origin, arguments = get_origin(declared), get_args(declared)
    if origin is Annotated:
        return describe(arguments[0], (*arguments[1:], *constraints))
    if origin in (Union, UnionType):
        return ", or ".join(describe(argument, constraints) for argument in arguments)
    if declared is NoneType:
        return "null"
    return f"{_kind(declared, origin, arguments)}{_limits(constraints)}"


def _kind(declared: Any, origin: Any, arguments: tuple[Any, ...]) -> str:
    if origin is Literal:
        return _one_of([str(value) for value in arguments])
    if origin is list:
        return f"a list, each item {describe(arguments[0])}"
    if origin is dict or origin is Mapping:
        return "a mapping"
    if isinstance(declared, type) and issubclass(declared, BaseModel):
        return f"a mapping with {', '.join(_names(declared))}"
    return _KINDS.get(declared, "another type")


def _problem(path: tuple[str | int, ...], found: list[ErrorDetails], prefix: str, model: type[BaseModel]) -> Problem:
    field = ".".join(str(part) for part in ([prefix] if prefix else []) + list(path))
    first = found[0]
    if first["type"] == "missing":
        return Problem(field, "is required")
    if first["type"] == "extra_forbidden":
        parent = _as_model(annotation_at(model, path[:-1]))
        return Problem(field, f"there is no such key; {near_miss(str(path[-1]), _names(parent) if parent else ())}")
    declared = annotation_at(model, path)
    return Problem(field, _sentence(field, declared, found), _shown(first["input"]))


def _sentence(field: str, declared: Any, found: list[ErrorDetails]) -> str:
    given = found[0]["input"]
    own = next((details["ctx"]["error"] for details in found if details["type"] == "value_error"), None)
    words = [str(value) for value in _literals(declared)]
    if own is not None:
        return f"{own}; or {_one_of(words)}" if words else str(own)
    sentence = f"must be {describe(declared)}" if declared is not None else found[0]["msg"]
    if isinstance(given, str) and words:
        miss = near_miss(given, words)
        return f"{sentence}; {miss}" if miss.startswith("did you mean") else sentence
    if isinstance(given, str) and _is_number(given):
        return f"{sentence}; without the quotes, {field}={given}, it is one"
    return sentence


def _path(location: tuple[str | int, ...], model: type[BaseModel]) -> tuple[str | int, ...]:
    """`location` without the names of union members that pydantic appends to it."""
    declared: Any = model
    for index, part in enumerate(location):
        parent = _as_model(declared)
        declared = _step(declared, part)
        if declared is None:
            return location[: index + 1] if parent is not None else location[:index]
    return location


def _step(declared: Any, part: str | int) -> Any:
    """The type one key or index below; None where there is none."""
    model = _as_model(declared)
    if model is not None:
        for name, field in model.model_fields.items():
            if part == (field.alias or name):
                return _declared(field)
        return None
    for member in _members(declared):
        if get_origin(member) is list and isinstance(part, int):
            return get_args(member)[0]
        if get_origin(member) is dict and isinstance(part, str):
            return get_args(member)[1]
    return None


def _declared(field: FieldInfo) -> Any:
    return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation


def _members(declared: Any) -> list[Any]:
    """The types of a union, without their constraints."""
    if get_origin(declared) is Annotated:
        return _members(get_args(declared)[0])
    if get_origin(declared) in (Union, UnionType):
        return [member for argument in get_args(declared) for member in _members(argument)]
    return [declared]


def _as_model(declared: Any) -> type[BaseModel] | None:
    return next((each for each in _members(declared) if isinstance(each, type) and issubclass(each, BaseModel)), None)


def _names(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _literals(declared: Any) -> list[Any]:
    return [value for member in _members(declared) if get_origin(member) is Literal for value in get_args(member)]


def _limits(metadata: Iterable[Any]) -> str:
    constraints = [each for item in metadata for each in getattr(item, "metadata", [item])]
    values = {name: getattr(each, name, None) for name in _NAMES for each in constraints if hasattr(each, name)}
    found = {name: value for name, value in values.items() if value is not None}
    bounds = " and".join(f" {word} {found[name]:g}" for name, word in _LIMITS if name in found)
    low, high = found.get("min_length"), found.get("max_length")
    if low is None and high is None:
        return bounds
    return f"{bounds}, {low} of them" if low == high else f"{bounds}, {low or 0} to {high or 'any number'} of them"


def _one_of(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _shown(value: object) -> str:
    """A value as it is typed on the command line; text in quotes, so that a number in quotes is seen to be text."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and (_is_number(value) or not value):
        return f"'{value}'"
    return str(value)
