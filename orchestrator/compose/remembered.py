"""What overrides came to in an earlier start. Hydra's imports and its composing take most of the time before modules
are imported; a start whose overrides and files of configuration are an earlier one's needs neither.

Kept in the folder of the disk cache, a JSON file each. What might come out otherwise next time is not kept: a value of
the environment that the files name is a part of what must be equal, and any other resolver ends it.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from orchestrator.cache.folder import usual_folder
from orchestrator.compose import Composed, Draft, compose, validated
from orchestrator.compose.folders import ConfigFolders
from orchestrator.config import CacheConfig, Config
from orchestrator.environment import version_of
from orchestrator.records import redact
from orchestrator.registry import Registry
from orchestrator.sources import code_of, own_code

_MOST = 64
"""Configurations kept; the oldest go first."""
_RUN_DIR = re.compile(r"run\.dir=(/[\w./-]*)")
"""A folder that every reader of it takes as it stands."""
_RUN = re.compile(r"[+~]*run(\.dir)?(=|$)")
_UNKNOWN = re.compile(r".*\$\{|[+~]*hydra\b", re.DOTALL)
"""Overrides that may bring files or values which are not looked at here."""
_RESOLVER = re.compile(r"\$\{\s*([\w.]+)\s*:\s*([^,}\s]*)")
_VARIABLE = re.compile(r"\w+")
_OF_HYDRA = {"now"}
"""Resolvers that `conf/config.yaml` has in Hydra's own node, which is no part of what is kept."""


def compose_or_recall(
    overrides: Sequence[str], *, registry: Registry, config_dir: Path | None, environment: Mapping[str, str]
) -> Composed:
    """`compose`, or what it gave an earlier start with everything equal; writes to the disk cache's folder.

    Raises:
        ConfigError, UserError: as `compose`.
    """
    asked = _Asked.of(overrides, ConfigFolders.find(registry, config_dir), environment)
    if asked is None:
        return compose(overrides, registry=registry, config_dir=config_dir)
    raw = asked.recalled()
    if raw is not None:
        return validated(Draft(raw), registry, overrides)
    composed = compose(overrides, registry=registry, config_dir=config_dir)
    asked.keep(composed.raw, composed.config.cache)
    return composed


@dataclass(frozen=True)
class _Asked:
    """A composition that can be remembered.

    Attributes:
        folder: of the disk cache; a start whose `cache.dir` is another one is not remembered.
        name: of the file: a hash of all that decides what is composed.
        run_dir: the one thing that is put into it afterwards, because it differs from start to start.
    """

    folder: Path
    name: str
    run_dir: str | None

    @classmethod
    def of(cls, overrides: Sequence[str], folders: ConfigFolders, environment: Mapping[str, str]) -> _Asked | None:
        """None where what is composed may depend on more than is known here."""
        found = [match for each in overrides if (match := _RUN_DIR.fullmatch(each))]
        kept = [each for each in overrides if not _RUN_DIR.fullmatch(each)]
        if len(found) > 1 or any(_UNKNOWN.match(each) or (found and _RUN.match(each)) for each in kept):
            return None
        texts = _texts(folders)
        variables = _variables(folders, texts)
        if variables is None or (found and any("${run" in text for text in texts.values())):
            return None
        decides = {
            "overrides": kept,
            "has run.dir": bool(found),
            "main": str(folders.main),
            "others": [str(folder) for folder in folders.others],
            "files": texts,
            "variables": {name: environment.get(name) for name in sorted(variables)},
            "code": [own_code(Path(__file__).parent), *code_of(Config)],
            "versions": [version_of(name) for name in ("hydra-core", "omegaconf")],
            "plugins of Hydra": _hydra_plugins(),
        }
        name = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
        folder = Path(usual_folder(environment)).expanduser()
        return cls(folder, name, found[0][1] if found else None)

    def recalled(self) -> dict[str, Any] | None:
        """None if there is none, or it cannot be read."""
        try:
            raw = json.loads(self._file.read_bytes())
        except (OSError, ValueError):
            return None
        if not isinstance(raw, dict) or not isinstance(raw.get("run"), dict):
            return None
        return self._with_run_dir(raw, self.run_dir)

    def keep(self, raw: dict[str, Any], cache: CacheConfig) -> None:
        """If the configuration's own cache is there and in use. What cannot be kept is composed again next time."""
        is_there = Path(cache.dir).expanduser() == self.folder
        without = self._with_run_dir(raw, None)
        text = json.dumps(without)
        # A name that is no text, or a value that JSON does not have, would come back as another.
        if not (cache.enabled and is_there and json.loads(text) == without and redact(text) == text):
            return
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".new-", dir=self._file.parent) as scratch:
                new = Path(scratch) / self.name
                new.write_text(text)
                new.replace(self._file)
            self._prune()

    @property
    def _file(self) -> Path:
        return self.folder / "composed" / f"{self.name}.json"

    def _with_run_dir(self, raw: dict[str, Any], run_dir: str | None) -> dict[str, Any]:
        return {**raw, "run": {**raw["run"], "dir": run_dir}} if self.run_dir is not None else raw

    def _prune(self) -> None:
        files = sorted(self._file.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in files[:-_MOST]:
            path.unlink(missing_ok=True)


def _texts(folders: ConfigFolders) -> dict[str, str]:
    """Every file of configuration, by its path."""
    found = (path for folder in (folders.main, *folders.others) for path in folder.rglob("*.yaml"))
    return {str(path): path.read_text(errors="surrogateescape") for path in sorted(found)}


def _variables(folders: ConfigFolders, texts: Mapping[str, str]) -> set[str] | None:
    """The environment variables that files of configuration name; None where they name what cannot be compared."""
    variables = set()
    for path, text in texts.items():
        own = _OF_HYDRA if Path(path) == folders.main / "config.yaml" else set()
        for resolver, argument in _RESOLVER.findall(text):
            if resolver == "oc.env" and _VARIABLE.fullmatch(argument):
                variables.add(argument)
            elif resolver not in own:
                return None
    return variables


def _hydra_plugins() -> list[list[Any]]:
    """Modules that Hydra would load, which may add to where it looks."""
    spec = find_spec("hydra_plugins")
    places = spec.submodule_search_locations if spec is not None else None
    found = (path for place in places or () for path in Path(place).rglob("*.py"))
    return sorted([str(path), path.stat().st_mtime_ns] for path in found)
