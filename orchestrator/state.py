"""What passes between stages that do not know each other: typed keys, each written once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from orchestrator.errors import PipelineError

T = TypeVar("T")


@dataclass(frozen=True)
class Key(Generic[T]):
    """The name and type of an artifact. Two keys of one name are the same key."""

    name: str
    type: type[T]

    def __repr__(self) -> str:
        return self.name


class State:
    """Artifacts by key. Written once, readable by all, dropped by `release`, put right by `correct`."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._released: set[str] = set()

    def put(self, key: Key[T], value: T) -> None:
        """Store `value`.

        Raises:
            PipelineError: the key was written before, or the value has another type.
        """
        if key.name in self._values or key.name in self._released:
            raise PipelineError(f"the artifact '{key}' was provided twice")
        if not isinstance(value, key.type):
            raise PipelineError(f"the artifact '{key}' is a {key.type.__name__}, not a {type(value).__name__}")
        self._values[key.name] = value

    def correct(self, key: Key[T], value: T) -> None:
        """Put `value` in place of one that was found wrong.

        Raises:
            PipelineError: there is none, or the value has another type.
        """
        self.get(key)
        del self._values[key.name]
        self.put(key, value)

    def get(self, key: Key[T]) -> T:
        """The value of `key`.

        Raises:
            PipelineError: nobody provided it, or it was released.
        """
        if key.name in self._values:
            return cast(T, self._values[key.name])
        why = "was released by an earlier stage" if key.name in self._released else "has not been provided"
        raise PipelineError(f"the artifact '{key}' {why}")

    def has(self, key: Key[Any]) -> bool:
        return key.name in self._values

    def release(self, key: Key[Any]) -> bool:
        """Let go of an artifact; whether there was one."""
        if key.name not in self._values:
            return False
        del self._values[key.name]
        self._released.add(key.name)
        return True

    def clear(self) -> None:
        self._values.clear()
