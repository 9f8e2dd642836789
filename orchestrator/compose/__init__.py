"""Overrides to a validated configuration. The only room, with `__main__`, that knows Hydra.

Hydra composes and stops at a plain dict; its errors, which speak of Hydra, become ones that speak of the field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.compose.folders import ConfigFolders
from orchestrator.compose.spelling import Given, read
from orchestrator.compose.tree import compose_tree, plain, sort_out, translated
from orchestrator.config import Config
from orchestrator.errors import ConfigError, Problem, UserError
from orchestrator.registry import Registry
from orchestrator.validation import problems_of

_OPEN = ("mm.processor_kwargs", "hydra.launcher.ray.init", "hydra.launcher.ray.remote")
"""Nodes whose keys this project does not know."""


@dataclass(frozen=True)
class Composed:
    """A configuration that can be started, as a plain dict too, and what was typed for it."""

    config: Config
    raw: dict[str, Any]
    overrides: list[str]


@dataclass
class Draft:
    """A composed configuration that may have problems. `missing` are the fields that still have to be given, `used` the
    overrides that could be applied."""

    raw: dict[str, Any]
    missing: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    used: list[Given] = field(default_factory=list)


def compose(overrides: Sequence[str], *, registry: Registry | None = None, config_dir: Path | None = None) -> Composed:
    """Compose and validate; reads files of configuration and touches nothing else.

    Args:
        overrides: in Hydra's grammar; what it would refuse or change (paths with blanks, JSON) is taken as meant.
        config_dir: one more folder of configuration to search.

    Raises:
        ConfigError: with every problem, of the configuration and of every stage's options.
        UserError: a plugin or a folder of configuration that cannot be used.
    """
    registry = registry or Registry.discover()
    folders = ConfigFolders.find(registry, config_dir)
    return validated(draft_of(read_all(overrides), folders), registry, overrides)


def read_all(overrides: Sequence[str], *, multirun: bool = False) -> list[Given]:
    """
    Raises:
        ConfigError: with every override that cannot be read.
    """
    given: list[Given] = []
    problems: list[Problem] = []
    for text in overrides:
        try:
            given.append(read(text, multirun=multirun))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return given


def draft_of(given: Sequence[Given], folders: ConfigFolders) -> Draft:
    """Compose; of overrides that cannot be applied, the rest is composed and each is a problem.

    Raises:
        ConfigError: Hydra refuses for another reason.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    problems = folders.problems_of(given)
    wrong = {problem.field for problem in problems}
    usable = [_opened(each) for each in given if each.head not in wrong]
    try:
        tree = compose_tree(usable, folders)
    except (HydraException, OmegaConfBaseException) as error:
        try:
            usable, more = sort_out(usable, folders)
            problems += more
            tree = compose_tree(usable, folders)
        except (HydraException, OmegaConfBaseException):
            raise ConfigError(problems or [translated(error)]) from None
    raw, missing = plain(tree)
    return Draft(raw, missing, problems, usable)


def validated(draft: Draft, registry: Registry, overrides: Sequence[str]) -> Composed:
    """
    Raises:
        ConfigError: with every problem of the draft, of the configuration and of every stage's options.
    """
    config, problems = examine(draft, registry)
    problems += required(draft)
    if problems or config is None:
        raise ConfigError(problems)
    return Composed(config, draft.raw, list(overrides))


def required(draft: Draft) -> list[Problem]:
    return [Problem(key, f"is required; give {key}=VALUE") for key in draft.missing]


def examine(draft: Draft, registry: Registry) -> tuple[Config | None, list[Problem]]:
    """The configuration if it is valid, and every problem but the missing fields.

    Raises:
        UserError: a plugin that the configuration names cannot be loaded, and nothing else is wrong.
    """
    from pydantic import ValidationError

    from orchestrator.pipeline import build

    config: Config | None = None
    problems = list(draft.problems)
    try:
        config = Config.model_validate(draft.raw)
    except ValidationError as error:
        problems += problems_of(error, "", Config)
    stages = draft.raw.get("stages")
    try:
        build(stages if isinstance(stages, dict) else {}, registry)
    except ConfigError as error:
        problems += error.problems
    except UserError as error:
        if not problems:
            raise
        problems.append(Problem("stages", str(error)))
    return config, [problem for problem in problems if problem.field not in draft.missing]


def _opened(each: Given) -> Given:
    """An override of an open node, or below one, adds its keys."""
    parts = each.key.split(".")
    # The options of a tracker are its own.
    of_tracker = parts[0] == "stages" and parts[2:3] == ["options"]
    is_open = of_tracker or any(f"{each.key}.".startswith(f"{node}.") for node in _OPEN)
    return each.adding() if is_open and not each.prefix else each
