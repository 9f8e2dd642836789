"""Overrides as people type them, in the spelling that Hydra's grammar takes.

Hydra reads values by a grammar of its own: blanks, `#`, `~`, `(` and `=` end in an error or in another text, and JSON
is not in it. What can only have been meant as text is quoted for it here.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from orchestrator.config import Config
from orchestrator.errors import ConfigError
from orchestrator.validation import takes_only_text

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

_OVERRIDE = re.compile(r"(?P<prefix>\+\+|\+|~|)(?P<key>[^=@]*)(?:@(?P<package>[^=]*))?(?:=(?P<value>.*))?", re.DOTALL)
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_TO_ESCAPE = re.compile(r"([\\()\[\]{}:=, \t])")
_SLOTS = "stages."


@dataclass(frozen=True)
class Given:
    """One override.

    Attributes:
        prefix: empty, `+`, `++` or `~`.
        key: dotted path, or the name of a group.
        package: where a group's choice goes, if it was given.
        value: as typed; None for a deletion without one.
        spelled: the whole override as Hydra takes it.
        sweep: the values of a sweep, each as Hydra takes it; empty for a single value.
    """

    prefix: str
    key: str
    package: str | None
    value: str | None
    spelled: str
    sweep: tuple[str, ...] = ()

    @property
    def head(self) -> str:
        """What stands before the `=`, without a prefix."""
        return self.key if self.package is None else f"{self.key}@{self.package}"

    @property
    def slot(self) -> str | None:
        """The slot of the pipeline whose stage this chooses, if it does."""
        is_slot = self.key == "stage" and self.package is not None and self.package.startswith(_SLOTS)
        return self.package.removeprefix(_SLOTS) if is_slot and self.package is not None else None

    @property
    def is_hydra(self) -> bool:
        return self.key == "hydra" or self.key.startswith(("hydra.", "hydra/"))

    def adding(self) -> Given:
        """The same for a key that may be new."""
        return replace(self, prefix="++", spelled=f"++{self.spelled}")

    def chosen(self, value: str) -> Given:
        """One point of a sweep."""
        return replace(self, value=value, spelled=f"{self.prefix}{self.head}={value}", sweep=())


def read(text: str, *, multirun: bool = False) -> Given:
    """
    Args:
        multirun: commas separate the values of a sweep.

    Raises:
        ConfigError: not an override, or a sweep without `multirun`.
    """
    match = _OVERRIDE.fullmatch(text)
    if match is None or not match["key"] or (match["value"] is None and match["prefix"] != "~"):
        raise ConfigError.of(text, "is not an override; write key=value")
    given = Given(match["prefix"], match["key"], match["package"], match["value"], text)
    if _parsed(f"{given.prefix}{given.head}=0") is None:
        raise ConfigError.of(given.head, "cannot be the name of a key; write key=value", given.value)
    if given.value is None:
        return given
    value, sweep = _spell(given, given.value, multirun)
    return replace(given, spelled=f"{given.prefix}{given.head}={value}", sweep=sweep)


def unescaped(text: str) -> str:
    """An override that Hydra spelled, with text in quotes where it has backslashes; `read` takes those for text."""
    parsed = _parsed(text) if "\\" in text else None
    value = parsed.value() if parsed is not None else None
    return f"{parsed.get_key_element()}={quoted(value)}" if parsed is not None and isinstance(value, str) else text


def is_interval(given: Given) -> bool:
    """Whether the values are drawn from an interval and cannot be listed."""
    parsed = _parsed(given.spelled) if given.sweep else None
    return parsed is not None and parsed.is_sweep_override() and not parsed.is_discrete_sweep()


def quoted(text: str) -> str:
    """Text in quotes, for Hydra's grammar."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text, Quote.single).with_quotes()


def _spell(given: Given, value: str, multirun: bool) -> tuple[str, tuple[str, ...]]:
    """The value for Hydra, and the values of the sweep if it is one."""
    from_json = _from_json(value, multirun)
    if from_json:
        return ",".join(from_json), tuple(from_json) if len(from_json) > 1 else ()
    parsed = _parsed(f"k={value}")
    if parsed is None:
        pieces = [_spell(given, piece, False)[0] for piece in value.split(",")] if multirun else []
        return (",".join(pieces), tuple(pieces)) if len(pieces) > 1 else (quoted(value), ())
    only_text = takes_only_text(Config, given.key.split("."))
    if parsed.is_sweep_override():
        if multirun:
            return value, _points(given, parsed)
        if only_text and _one_path(value):
            return quoted(value), ()
        raise ConfigError.of(given.head, _needs_multirun(value), value)
    return (quoted(value) if _is_changed(value, parsed.value(), only_text) else value), ()


def _is_changed(value: str, parsed: Any, only_text: bool) -> bool:
    """Whether Hydra made something else of what can only have been meant as text."""
    if value[:1] in ("'", '"') or "${" in value or parsed == value or parsed is None or not value:
        return False
    return only_text or (isinstance(parsed, str) and ("/" in value or "\\" in value))


def _one_path(value: str) -> bool:
    """Whether text with commas is one path and not several."""
    others = [piece.lstrip() for piece in value.split(",")[1:]]
    return "/" in value and not any(piece.startswith(("/", "~", "./", "../")) for piece in others)


def _needs_multirun(value: str) -> str:
    return f"several values need -m (a sweep); a list is written [{value}], one text with a comma '\"{value}\"'"


def _points(given: Given, parsed: Override) -> tuple[str, ...]:
    if not parsed.is_discrete_sweep():
        # Sweepers that search draw from intervals; their ends are values that they may come to.
        interval = parsed.value()
        return (str(getattr(interval, "start", given.value)), str(getattr(interval, "end", given.value)))
    if "glob(" in (given.value or ""):
        return (given.value or "",)
    return tuple(parsed.sweep_string_iterator())


def _parsed(text: str) -> Override | None:
    """Hydra's reading of an override; None where it has none."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(text)
    except (HydraException, ValueError):
        return None


def _from_json(value: str, multirun: bool) -> list[str]:
    """JSON mappings or lists in Hydra's spelling; nothing where it is not JSON, or where both spell it alike."""
    if value[:1] not in ("{", "[") or '"' not in value:
        return []
    try:
        return [_hydra(json.loads(value))]
    except ValueError:
        pass
    try:
        return [_hydra(each) for each in json.loads(f"[{value}]")] if multirun else []
    except ValueError:
        return []


def _hydra(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{_hydra_key(key)}:{_hydra(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_hydra(item) for item in value) + "]"
    return quoted(value) if isinstance(value, str) else json.dumps(value)


def _hydra_key(key: str) -> str:
    return key if _WORD.fullmatch(key) else _TO_ESCAPE.sub(r"\\\1", key)
