"""Composing with Hydra, and finding out which override it could not take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.compose.folders import ConfigFolders
from orchestrator.compose.spelling import Given
from orchestrator.errors import ConfigError, Problem, near_miss

if TYPE_CHECKING:
    from omegaconf import DictConfig

CONFIG_NAME = "config"
VERSION_BASE = "1.3"


_EXTRAS = {
    ("hydra/launcher", "joblib"): "joblib",
    ("hydra/launcher", "ray"): "ray",
    ("hydra/launcher", "submitit_local"): "submitit",
    ("hydra/launcher", "submitit_slurm"): "submitit",
    ("hydra/sweeper", "optuna"): "optuna",
}
"""Choices that come with a package, and the extra of this project that installs it."""


def compose_tree(given: Sequence[Given], folders: ConfigFolders, *, with_hydra: bool = False) -> DictConfig:
    """
    Args:
        with_hydra: also Hydra's own node, whose interpolations are not resolved yet.

    Raises:
        HydraException, OmegaConfBaseException: an override that cannot be applied.
    """
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(folders.main), job_name="orchestrator", version_base=VERSION_BASE):
        overrides = [*(each.spelled for each in given), folders.search_path_override()]
        return compose(CONFIG_NAME, overrides, return_hydra_config=with_hydra)


def plain(tree: DictConfig) -> tuple[dict[str, Any], list[str]]:
    """A tree of Hydra's as a plain dict, interpolations resolved, and the fields that still have to be given.

    Raises:
        ConfigError: an interpolation that cannot be resolved.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        missing = sorted(OmegaConf.missing_keys(tree))
        raw = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError.of(str(error.full_key or "configuration"), first_line(str(error.msg or error))) from None
    if not isinstance(raw, dict):
        raise ConfigError.of("configuration", "is not a mapping")
    return {str(key): value for key, value in raw.items()}, missing


def sort_out(given: Sequence[Given], folders: ConfigFolders) -> tuple[list[Given], list[Problem]]:
    """The overrides that can be applied, and a problem for each other one.

    Raises:
        HydraException, OmegaConfBaseException: as `compose_tree`, from a choice that no check here has foreseen.
    """
    choices, others = _split(given, folders)
    usable, problems = _with_slots(choices, folders)
    tree = _tree_without_values(usable, folders)
    added = {each.key.split(".")[1] for each in others if each.prefix and each.key.startswith("stages.")}
    keys, slots = _keys(tree), {*tree.get("stages", {}), *added}
    for each in others:
        parts = each.key.split(".")
        if each.is_hydra or each.key in keys or each.prefix in ("+", "++"):
            usable.append(each)
        elif parts[0] == "stages" and len(parts) > 2 and parts[1] in slots and not each.prefix:
            usable.append(each.adding())  # the stage's own Config knows its options
        else:
            known = {*keys, *folders.options} if "." not in each.key else keys
            problems.append(Problem(each.head, f"there is no such key; {_nearest(each.key, known)}", each.value))
    return usable, problems


def translated(error: Exception) -> Problem:
    """An error of Hydra's that no check of ours has foreseen, in one line and without its advice."""
    from hydra.errors import MissingConfigException

    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = error.missing_cfg_file.rpartition("/")
        if (group, name) in _EXTRAS:
            extra = _EXTRAS[group, name]
            return Problem(
                group, f"comes with a package that is not installed; pip install 'orchestrator[{extra}]'", name
            )
        return Problem(group, f"there is no {group} of that name; {near_miss(name, error.options)}", name)
    text = first_line(str(error)) or type(error).__name__
    cause = first_line(str(error.__cause__ or ""))
    return Problem("configuration", text if cause in text else f"{text} {cause}")


def _split(given: Sequence[Given], folders: ConfigFolders) -> tuple[list[Given], list[Given]]:
    """Choices from groups, and values."""
    choices = [each for each in given if folders.is_choice(each)]
    return choices, [each for each in given if not folders.is_choice(each)]


def _with_slots(choices: Sequence[Given], folders: ConfigFolders) -> tuple[list[Given], list[Problem]]:
    """The choices without those for slots that the pipeline neither has nor gets, and a problem for each of those."""
    if all(each.slot is None for each in choices):
        return list(choices), []
    tree = _tree_without_values([each for each in choices if each.slot is None], folders)
    slots = set(tree.get("stages", {}))
    added = {each.slot for each in choices if each.slot is not None and each.prefix in ("+", "++")}
    wrong = [each for each in choices if each.slot is not None and each.slot not in slots | added]
    problems = [
        Problem(each.head, f"the pipeline has no such slot; {near_miss(each.slot or '', slots)}", each.value)
        for each in wrong
    ]
    return [each for each in choices if each not in wrong], problems


def _tree_without_values(choices: Sequence[Given], folders: ConfigFolders) -> dict[str, Any]:
    return plain(compose_tree(choices, folders))[0]


def _keys(node: Any, prefix: str = "") -> set[str]:
    """Every dotted path, of nodes and of values."""
    if not isinstance(node, dict):
        return set()
    return {path for key, value in node.items() for path in (f"{prefix}{key}", *_keys(value, f"{prefix}{key}."))}


def _nearest(key: str, known: set[str]) -> str:
    """The near miss among all paths, then among their last parts, then the list of the siblings."""
    miss = near_miss(key, known)
    if miss.startswith("did you mean"):
        return miss
    last = {
        path.rpartition(".")[2]: path for path in sorted(known, key=lambda path: (path.count("."), path), reverse=True)
    }
    close = near_miss(key.rpartition(".")[2], last)
    if close.startswith("did you mean"):
        return f"did you mean {last[close.removeprefix('did you mean ').removesuffix('?')]}?"
    parent = key.rpartition(".")[0]
    while parent and parent not in known:
        parent = parent.rpartition(".")[0]
    return near_miss(key, {path for path in known if path.rpartition(".")[0] == parent})


def first_line(text: str) -> str:
    """The first that is not blank."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
