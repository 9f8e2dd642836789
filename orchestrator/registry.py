"""Names to classes. Built-ins stand in a table; strangers come by entry point, from `plugins/` of a checkout or from
what is installed. Nothing is imported before it is asked for by name.

`python -m orchestrator.registry [NAME]` prints what there is.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from orchestrator.errors import PluginError, UnknownNameError

PREFIX = "orchestrator."
KINDS = {
    "stages": "stage",
    "engines": "engine",
    "profilers": "profiler",
    "loaders": "weights loader",
    "attention": "attention backend",
    "models": "model maker",
    "trackers": "tracker",
    "conf": "configuration folder",
}
"""Plugin groups, and what one member is called. The entry-point group of `stages` is `orchestrator.stages`."""

_BUILT_IN = {
    "stages": {
        "load_weights": "orchestrator.stages.load_weights:LoadWeights",
        "dummy_data": "orchestrator.stages.dummy_data:DummyData",
        "profile_run": "orchestrator.stages.profile_run:ProfileRun",
        "graph_capture": "orchestrator.stages.graph_capture:GraphCapture",
        "clear_caches": "orchestrator.stages.clear_caches:ClearCaches",
        "allocate_kv": "orchestrator.stages.allocate_kv:AllocateKV",
        "verify": "orchestrator.stages.verify:Verify",
        "track": "orchestrator.stages.track:Track",
    },
    "engines": {
        "transformers": "orchestrator.engine.transformers:TransformersEngine",
        "plan": "orchestrator.engine.planning.engine:PlannedEngine",
    },
    "profilers": {
        "generic": "orchestrator.modality.generic:GenericProfiler",
        "gemma3": "orchestrator.modality.tiles:Gemma3Profiler",
        "idefics3": "orchestrator.modality.tiles:Idefics3Profiler",
        "llava_onevision": "orchestrator.modality.llava_onevision:LlavaOnevisionProfiler",
        "qwen2_5_omni_thinker": "orchestrator.modality.qwen_audio:Qwen25OmniProfiler",
        "qwen2_5_vl": "orchestrator.modality.qwen_vl:QwenVLProfiler",
        "qwen2_audio": "orchestrator.modality.qwen_audio:Qwen2AudioProfiler",
        "qwen2_vl": "orchestrator.modality.qwen_vl:QwenVLProfiler",
        "qwen3_vl": "orchestrator.modality.qwen_vl:Qwen3VLProfiler",
        "smolvlm": "orchestrator.modality.tiles:SmolVLMProfiler",
    },
    "loaders": {
        "safetensors": "orchestrator.engine.weights.safetensors:SafetensorsLoader",
        "transformers": "orchestrator.engine.weights.transformers:TransformersLoader",
        "fastsafetensors": "orchestrator.engine.weights.fastsafetensors:FastSafetensorsLoader",
        "dummy": "orchestrator.engine.weights.dummy:DummyLoader",
    },
    "attention": {
        "reference": "orchestrator.engine.attention.reference:ReferenceAttention",
        "triton": "orchestrator.engine.attention.triton:TritonAttention",
        "varlen": "orchestrator.engine.attention.varlen:VarlenAttention",
    },
    "models": {
        "tiny_internvl": "orchestrator.engine.models.tiny_internvl:TinyInternVL",
        "internvl2_5_8b": "orchestrator.engine.models.real:InternVL25",
        "qwen2_5_vl_3b": "orchestrator.engine.models.real:Qwen25VL3B",
        "qwen2_5_vl_7b": "orchestrator.engine.models.real:Qwen25VL7B",
        "llava_onevision_7b": "orchestrator.engine.models.real:LlavaOnevision7B",
        "qwen2_audio_7b": "orchestrator.engine.models.real:Qwen2Audio7B",
        "opt_125m": "orchestrator.engine.models.real:Opt125M",
        "smollm2_135m": "orchestrator.engine.models.smollm2:SmolLM2",
    },
}


@dataclass(frozen=True)
class Plugin:
    """A name and what it stands for.

    Attributes:
        value: `module:Attribute`; for the group `conf`, `package:folder`.
        origin: who brings it, for people: `built-in`, `plugins/x` or a distribution with its version.
        root: the folder that must be on `sys.path` for it to be found; None if it is installed.
    """

    group: str
    name: str
    value: str
    origin: str
    root: Path | None = None


class Registry:
    """Every plugin there is, by group and name."""

    def __init__(self, plugins: Iterable[Plugin]) -> None:
        """
        Raises:
            PluginError: two plugins of one name with different values; the same one found twice is one.
        """
        self._plugins: dict[str, dict[str, Plugin]] = {group: {} for group in KINDS}
        for plugin in plugins:
            known = self._plugins[plugin.group].setdefault(plugin.name, plugin)
            if known.value != plugin.value:
                raise PluginError(
                    f"two plugins are called '{plugin.name}' in {PREFIX}{plugin.group}: {known.value} from "
                    f"{known.origin} and {plugin.value} from {plugin.origin}; rename or uninstall one"
                )

    @classmethod
    def discover(cls, checkout: Path | None = None) -> Registry:
        """Built-ins, plugins of the checkout, installed plugins.

        Args:
            checkout: the folder that holds `plugins/`; by default where this package lies, if that is a checkout.

        Raises:
            PluginError: two plugins of one name, or a declaration that cannot be read.
        """
        if checkout is None:
            above = Path(__file__).resolve().parent.parent
            checkout = above if (above / "pyproject.toml").is_file() else None
        local = _in_checkout(checkout) if checkout is not None else ()
        return cls([*_built_in(), *local, *_installed()])

    def names(self, group: str) -> list[str]:
        return sorted(self._plugins[group])

    def has(self, group: str, name: str) -> bool:
        return name in self._plugins[group]

    def check(self, group: str, name: str, field: str) -> None:
        """Refuse a name that nothing has, without importing what has it.

        Args:
            field: of the configuration, that the name was given in.

        Raises:
            UnknownNameError: no plugin has the name.
        """
        if not self.has(group, name) and ":" not in name:
            raise UnknownNameError(KINDS[group], name, self.names(group), field)

    def plugins(self) -> list[Plugin]:
        return [plugin for group in self._plugins.values() for _, plugin in sorted(group.items())]

    def origin(self, group: str, name: str) -> str:
        """Who brings `name`; the module itself for a `module:Attribute`."""
        return self._plugins[group][name].origin if self.has(group, name) else name.partition(":")[0]

    def resolve(self, group: str, name: str) -> Any:
        """What `name` stands for. `module:Attribute` is taken as it is, and imports that module.

        Raises:
            UnknownNameError: no plugin has the name.
            PluginError: it cannot be imported, or is not what its group promises.
        """
        plugin = self._plugins[group].get(name)
        if plugin is None and ":" not in name:
            raise UnknownNameError(KINDS[group], name, self.names(group))
        plugin = plugin or Plugin(group, name, name, "the configuration")
        found = _load(plugin)
        if group == "stages":
            _check_stage(plugin, found)
        return found

    def conf_dirs(self) -> list[Path]:
        """Folders of configuration that plugins bring, found without importing the plugins.

        Raises:
            PluginError: a folder that is not there.
        """
        return [_conf_dir(plugin) for _, plugin in sorted(self._plugins["conf"].items())]


def _built_in() -> Iterator[Plugin]:
    for group, names in _BUILT_IN.items():
        for name, value in names.items():
            yield Plugin(group, name, value, "built-in")


def _in_checkout(checkout: Path) -> Iterator[Plugin]:
    for declaration in sorted(checkout.glob("plugins/*/pyproject.toml")):
        try:
            project = tomllib.loads(declaration.read_text()).get("project", {})
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
            raise PluginError(f"{declaration} cannot be read: {error}") from error
        folder = declaration.parent
        root = folder / "src" if (folder / "src").is_dir() else folder
        for entry_group, names in project.get("entry-points", {}).items():
            group = entry_group.removeprefix(PREFIX)
            if entry_group.startswith(PREFIX) and group in KINDS:
                for name, value in names.items():
                    yield Plugin(group, name, value, f"plugins/{folder.name}", root)


def _installed() -> Iterator[Plugin]:
    for distribution in distributions():
        for entry in distribution.entry_points:
            group = entry.group.removeprefix(PREFIX)
            if entry.group.startswith(PREFIX) and group in KINDS:
                value = entry.value.partition("[")[0].strip()
                yield Plugin(group, entry.name, value, f"{distribution.name} {distribution.version}")


def _load(plugin: Plugin) -> Any:
    module, _, attribute = plugin.value.partition(":")
    # On sys.path and not by file, because processes that this one spawns inherit sys.path, and so can unpickle what the
    # plugin defines. At the end of it, so that a plugin never hides an installed package.
    if plugin.root is not None and str(plugin.root) not in sys.path:
        sys.path.append(str(plugin.root))
    what = f"the {KINDS[plugin.group]} '{plugin.name}' of {plugin.origin}"
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        raise PluginError(f"{what}: importing {module} failed: {type(error).__name__}: {error}") from error
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise PluginError(f"{what}: {module} has no '{attribute}'") from None
    return found


def _check_stage(plugin: Plugin, found: Any) -> None:
    from orchestrator.stage import Stage, StageConfig

    what = f"the stage '{plugin.name}' of {plugin.origin}, {plugin.value},"
    if not (isinstance(found, type) and issubclass(found, Stage)):
        raise PluginError(f"{what} is not a subclass of orchestrator.Stage")
    if not (isinstance(found.Config, type) and issubclass(found.Config, StageConfig)):
        raise PluginError(f"{what} has a Config that is not a subclass of orchestrator.StageConfig")


def _conf_dir(plugin: Plugin) -> Path:
    package, _, folder = plugin.value.partition(":")
    if plugin.root is not None:
        path = plugin.root.joinpath(*package.split("."), folder)
    else:
        spec = importlib.util.find_spec(package.partition(".")[0])
        if spec is None or not spec.submodule_search_locations:
            raise PluginError(f"the configuration of {plugin.origin}: there is no package {package}")
        path = Path(next(iter(spec.submodule_search_locations))).joinpath(*package.split(".")[1:], folder)
    if not path.is_dir():
        raise PluginError(f"the configuration of {plugin.origin}: there is no folder {path}")
    return path


if __name__ == "__main__":
    from orchestrator.registry_cli import main

    sys.exit(main(sys.argv[1:]))
