"""The folders of configuration, and the choices that each group offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.compose.spelling import Given, quoted
from orchestrator.errors import ConfigError, PluginError, Problem, near_miss
from orchestrator.registry import Registry


def main_folder() -> Path:
    """`conf/` of this installation: inside the package where it came as a wheel, beside it in a checkout.

    Raises:
        PluginError: an installation without it.
    """
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise PluginError(f"the installation at {package} has no conf/config.yaml; install it again")


@dataclass(frozen=True)
class ConfigFolders:
    """Where Hydra looks: `main` first, then `others`. `options` are the choices, by group."""

    main: Path
    others: tuple[Path, ...] = ()
    options: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def find(cls, registry: Registry, config_dir: Path | None = None) -> ConfigFolders:
        """
        Raises:
            ConfigError: `config_dir` is not a folder.
            PluginError: two folders bring the same file, of which Hydra would silently take one.
        """
        main, plugins = main_folder(), registry.conf_dirs()
        brought: dict[str, Path] = {}
        for folder in (main, *plugins):
            for name in _files(folder):
                if name in brought:
                    raise PluginError(f"{name} is brought by {brought[name]} and by {folder}; rename one")
                brought[name] = folder
        if config_dir is not None and not config_dir.is_dir():
            raise ConfigError.of("--config-dir", "there is no such folder", config_dir)
        more = () if config_dir is None else (config_dir.resolve(),)
        names = {*brought, *(name for folder in more for name in _files(folder))}
        return cls(main, (*plugins, *more), _options(names))

    def search_path_override(self) -> str:
        return f"hydra.searchpath=[{','.join(quoted(f'file://{folder}') for folder in self.others)}]"

    def is_choice(self, given: Given) -> bool:
        """Whether an override chooses from a group."""
        return given.key in self.options or "/" in given.key

    def problems_of(self, given: Sequence[Given]) -> list[Problem]:
        """A problem for each choice that its group does not offer, and for what cannot be said at all."""
        problems = [problem for each in given if (problem := self._problem(each)) is not None]
        heads = [each.head for each in given if self.is_choice(each) and each.prefix != "~"]
        twice = {head for head in heads if heads.count(head) > 1}
        return problems + [Problem(head, "is chosen twice; keep one") for head in sorted(twice)]

    def _problem(self, given: Given) -> Problem | None:
        if given.key == "hydra.run.dir":
            return Problem(given.head, "is not used here; give run.dir", given.value)
        if given.is_hydra or given.prefix == "~":
            return None
        if given.key in self.options:
            names = given.sweep or (given.value or "",)
            return next((problem for name in names if (problem := self.unknown(given, name)) is not None), None)
        if "/" in given.key or given.package is not None:
            return Problem(given.head, f"there is no such group; {near_miss(given.key, self.options)}", given.value)
        return None

    def unknown(self, given: Given, name: str) -> Problem | None:
        """The problem with choosing `name` from the group of `given`, if there is one."""
        known = self.options[given.key]
        bare = name.strip("'\"")
        if bare in known or bare.removesuffix(".yaml") in known or "${" in bare or bare == "null":
            return None
        if given.key == "model" and ("/" in bare or bare.startswith((".", "~"))):
            message = f"is not the name of a model; a folder or hub id is given as model=auto model.path={bare}"
            return Problem(given.head, message, bare)
        return Problem(given.head, f"there is no {given.key} of that name; {near_miss(bare, known)}", bare)


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))


def _options(names: set[str]) -> dict[str, tuple[str, ...]]:
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        group, _, option = name.rpartition("/")
        if group:
            groups.setdefault(group, []).append(option)
    return {group: tuple(options) for group, options in groups.items()}
