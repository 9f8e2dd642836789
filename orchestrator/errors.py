"""The exceptions of the project, and the exit code each one means.

OrchestratorError
|-- UserError                 2   what was asked for cannot work, whatever the machine does
|   |-- ConfigError               one or more fields with a wrong value, name or type
|   |-- UnknownNameError          a name that no plugin has
|   |-- PluginError               a plugin that cannot be found, loaded or told from another
|   |-- PipelineError             stages that do not fit together
|   |-- CheckpointError           a model folder that cannot be started
|   `-- BudgetError               bytes that do not fit; carries wanted, free and what would work
|-- StageError                1   a stage that failed at its work
|   |-- DeviceOutOfMemoryError    the device refused an allocation
|   |-- StageTimeoutError         a stage that took longer than its limit; carries where it stood
|   |-- StillHeldError            caches that were to be empty and are not
|   `-- VerificationError         the started engine does not do what it should
`-- CacheError                    an entry of the disk cache that must not be used; never reaches a user
Interrupted             130, 143  Ctrl-C or SIGTERM; not an Exception, so that no library swallows it
"""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


class OrchestratorError(Exception):
    """Base of everything this project raises on purpose."""

    exit_code = 1


class UserError(OrchestratorError):
    """What the user asked for cannot work."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One field that cannot work: where it is, what was given (as text), and why, with what would work."""

    field: str
    message: str
    value: str | None = None

    def __str__(self) -> str:
        given = f"{self.field}={self.value}" if self.value is not None else self.field
        return f"{given}: {self.message}"


class ConfigError(UserError):
    """One or more configuration fields that cannot work."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    @classmethod
    def of(cls, field: str, message: str, value: object = None) -> ConfigError:
        return cls([Problem(field, message, None if value is None else str(value))])


class UnknownNameError(UserError):
    """A name that nothing provides."""

    def __init__(self, kind: str, name: str, known: Iterable[str], field: str | None = None) -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        where = f"{field}={name}" if field else f"'{name}'"
        super().__init__(f"{where}: there is no {kind} of that name; {near_miss(name, self.known)}")


class PluginError(UserError):
    """A plugin that cannot be found, loaded or told from another."""


class PipelineError(UserError):
    """Stages that do not fit together."""


class CheckpointError(UserError):
    """A model folder that cannot be started."""


class BudgetError(UserError):
    """Bytes that do not fit.

    Args:
        wanted_bytes: what the request takes.
        free_bytes: what there is for it.
        suggestions: field -> a value that works.
        certain: whether all that counts was measured; otherwise a value only could work.
    """

    def __init__(
        self,
        message: str,
        *,
        wanted_bytes: int,
        free_bytes: int,
        suggestions: Mapping[str, str] | None = None,
        certain: bool = True,
    ) -> None:
        self.wanted_bytes, self.free_bytes = wanted_bytes, free_bytes
        self.suggestions = dict(suggestions or {})
        works = " or ".join(f"{field}={value}" for field, value in self.suggestions.items())
        super().__init__(f"{message}; {works} {'would' if certain else 'could'} work" if works else message)


class StageError(OrchestratorError):
    """A stage that failed at its work."""


class DeviceOutOfMemoryError(StageError):
    """The device refused an allocation."""


class StageTimeoutError(StageError):
    """A stage took longer than its limit.

    Args:
        place: where it stood, innermost first.
        span: the innermost span that it was in.
    """

    def __init__(self, slot: str, seconds: float, place: Sequence[str], span: str | None = None) -> None:
        self.slot, self.seconds, self.place, self.span = slot, seconds, tuple(place), span
        inside = f" in the span '{span}'" if span is not None else ""
        stood = ", called from ".join(self.place) or "an unknown place"
        super().__init__(f"stages.{slot}.timeout_s={seconds:g}: the stage had not ended; it stood{inside} at {stood}")


class StillHeldError(StageError):
    """Caches that were to be empty and are not."""

    def __init__(self, held: Mapping[str, int]) -> None:
        self.held = dict(held)
        what = ", ".join(f"{name} ({count})" for name, count in self.held.items())
        super().__init__(f"still held after clearing: {what}")


class VerificationError(StageError):
    """The started engine does not do what it should."""


class CacheError(OrchestratorError):
    """An entry of the disk cache that must not be used."""


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM."""

    def __init__(self, signum: int = signal.SIGINT) -> None:
        self.signum = signum
        super().__init__(signal.Signals(signum).name)

    @property
    def exit_code(self) -> int:
        return 128 + self.signum


def near_miss(name: str, known: Iterable[str]) -> str:
    """'did you mean X?' where a known name is close, else the list of what there is."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]}?"
    return f"there are: {', '.join(names)}" if names else "there are none"
