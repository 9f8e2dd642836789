"""The configuration of a recorded run, for this version of the program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.compose import compose
from orchestrator.config import Config
from orchestrator.errors import ConfigError, UserError
from orchestrator.pipeline import build
from orchestrator.records import RunRecord
from orchestrator.registry import Registry
from orchestrator.validation import validate

_LEFT_OUT = "***"
"""What stands in a record in the place of a secret."""


@dataclass(frozen=True)
class Repeatable:
    """What is to be started, and what had to be settled for it, a sentence each."""

    config: Config
    notes: tuple[str, ...] = ()


def repeatable(record: RunRecord, registry: Registry) -> Repeatable:
    """The resolved configuration, and not the overrides: what has changed in the YAML files since does not matter.

    Its record goes elsewhere. Peaks are measured or taken over from a start-up plan as the run did.

    Raises:
        UserError: the record has no configuration, lacks a secret, or has keys that there are no longer.
    """
    if not record.config:
        raise UserError(f"{record.run_id}: has no configuration; it failed before there was one")
    secret = next((path for path, value in _texts(record.config, "") if _LEFT_OUT in value), None)
    if secret is not None:
        raise UserError(f"{record.run_id}: {secret} had a secret, which no record has; start it by its overrides")
    settled, added = _completed(record.config, registry)
    notes = [f"{path} did not exist then; it is {value}" for path, value in added]
    try:
        config = validate(Config, settled)
        build(config.stages, registry)
    except ConfigError as error:
        found = "; ".join(str(problem) for problem in error.problems)
        raise UserError(f"{record.run_id}: this version cannot run its configuration: {found}") from None
    run = config.run.model_copy(update={"dir": None, "skip_existing": False})
    changes: dict[str, Any] = {"run": run}
    if config.startup_plan == "use" and not _took_over(record):
        changes["startup_plan"] = "off"
        notes.append("startup_plan=off here: the run measured its peaks and took over nothing")
    return Repeatable(config.model_copy(update=changes), tuple(notes))


def _took_over(record: RunRecord) -> bool:
    told = (stage.metrics.get("startup_plan") for stage in record.stages)
    return any(isinstance(each, Mapping) and each.get("status") == "hit" for each in told)


def _completed(config: Mapping[str, Any], registry: Registry) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    """The configuration with today's defaults for keys that an older one does not have, and these keys."""
    # A stage's options have their defaults in its own Config.
    known = {name: node for name, node in compose([], registry=registry).raw.items() if name != "stages"}
    added: list[tuple[str, Any]] = []
    return _filled(config, known, "", added), added


def _filled(
    given: Mapping[str, Any], known: Mapping[str, Any], prefix: str, added: list[tuple[str, Any]]
) -> dict[str, Any]:
    filled = dict(given)
    for name, default in known.items():
        path = f"{prefix}{name}"
        if name not in given:
            filled[name] = default
            added.append((path, default))
        elif isinstance(given[name], Mapping) and isinstance(default, Mapping) and default:
            filled[name] = _filled(given[name], default, f"{path}.", added)
    return filled


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _texts(item, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, path)
    elif isinstance(value, str):
        yield path, value
