"""Who may import whom: the table of levels, read from the source and not from what happens to be loaded."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "orchestrator"

LEVELS: dict[str, float] = {
    "errors": 0,
    "units": 0,
    "sources": 0,
    "state": 0.5,
    "events": 0,
    "clock": 0,
    "dotted": 0,
    "arguments": 0,
    "signals": 0.5,
    "commands": 0.7,
    "watchdog": 0.5,
    "last_words": 0.5,
    "memory": 1,
    "modality.budget": 1,
    "config": 1,
    "validation": 1,
    "device.base": 2,
    "modality.base": 2,
    "schema": 2.5,
    "engine.base": 2.5,
    "engine.remembering": 2.5,
    "engine.warming": 2.5,
    "records": 2,
    "cache": 2,
    "checkpoint": 3,
    "model_folder": 2,
    "originals": 2,
    "hub": 1.5,
    "tensorfile": 1,
    "loaders": 0.5,
    "environment": 2,
    "tracking": 2,
    "model_files": 2,
    "provenance": 5.5,
    "rundir": 3,
    "skipping": 3,
    "timeline": 3,
    "import_timer": 0,
    "importing": 0,
    "beside": 2.2,
    "read_ahead": 2,
    "early": 6,
    "stage": 3,
    "planned": 3,
    "promises": 2,
    "card": 2.5,
    "opening": 3,
    "out_of_memory": 3,
    "measuring": 5,
    "artifacts": 3,
    "startup_plan": 3.5,
    "stages": 4,
    "engine": 4,
    "device.plan": 3.5,
    "device": 4,
    "modality": 4,
    "registry": 5,
    "pipeline": 6,
    "conclusion": 6.5,
    "report": 6,
    "app": 7,
    "compose": 8,
    "starting": 9,
    "planning": 9,
    "plan": 10,
    "registry_cli": 9,
    "__main__": 9,
    "zygote": 10,
    "rerun": 10,
    "dependent": 11,
    "bench": 10,
}
"""The longest entry that a module's name begins with counts. A half stands within its level, above the others there."""

HEAVY = {"torch", "torchvision", "transformers", "PIL", "diskcache", "safetensors", "numpy", "huggingface_hub"}
LEAVES = ("engine", "device.cuda", "device.cuda_lane", "device.cpu")
"""Rooms that may import heavy packages at module level."""


@dataclass(frozen=True)
class Import:
    """One import; `top` if it happens when the module is imported."""

    source: str
    target: str
    top: bool
    typing_only: bool


def imports_of(path: Path, source: str) -> Iterator[Import]:
    yield from _walk(ast.parse(path.read_text()), source, top=True, typing_only=False)


def _walk(node: ast.AST, source: str, *, top: bool, typing_only: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(source, alias.name, top, typing_only)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{source}: relative import"
            for alias in child.names:
                yield Import(source, f"{child.module}.{alias.name}", top, typing_only)
        elif isinstance(child, ast.If) and "__main__" in ast.dump(child.test):
            continue  # a command's own entry, which may reach up
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            yield from _walk(child, source, top=False, typing_only=True)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _walk(child, source, top=top and not inside, typing_only=typing_only)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def level(name: str) -> float:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in LEVELS:
            return LEVELS[".".join(parts[:length])]
    raise AssertionError(f"{name} has no level; add it to the table")


def room(name: str) -> str:
    return name.partition(".")[0]


def module_behind(target: str) -> str:
    """The module of this package that `orchestrator.a.b.Name` comes from, without the package's own name."""
    parts = target.split(".")[1:]
    while parts and not (PACKAGE.joinpath(*parts).is_dir() or PACKAGE.joinpath(*parts).with_suffix(".py").is_file()):
        parts.pop()
    return ".".join(parts)


SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py" and "conf" not in path.parts)
IMPORTS = [each for path in SOURCES for each in imports_of(path, module_name(path))]
PLUGIN_FOLDERS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))


def is_in(name: str, rooms: tuple[str, ...]) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in rooms)


def test_every_module_has_a_level() -> None:
    assert all(level(module_name(path)) >= 0 for path in SOURCES)


def test_a_module_imports_only_from_lower_levels_or_its_own_package() -> None:
    wrong = []
    for each in IMPORTS:
        if each.typing_only or each.target.partition(".")[0] != "orchestrator":
            continue
        target = module_behind(each.target)
        if target and room(target) != room(each.source) and level(target) >= level(each.source):
            wrong.append(f"{each.source} ({level(each.source)}) imports {target} ({level(target)})")
    assert not wrong, "\n".join(wrong)


def test_heavy_packages_are_imported_by_leaves_only_or_inside_functions() -> None:
    heavy = [each for each in IMPORTS if each.top and each.target.partition(".")[0] in HEAVY]
    assert [each for each in heavy if not is_in(each.source, LEAVES)] == []


def test_only_compose_and_main_know_hydra() -> None:
    knows = {each.source for each in IMPORTS if each.target.partition(".")[0] in ("hydra", "omegaconf")}
    assert {name for name in knows if not is_in(name, ("compose", "__main__"))} == set()


def test_stages_meet_only_through_keys() -> None:
    forbidden = ("registry", "pipeline", "app", "compose")
    for each in IMPORTS:
        if room(each.source) == "stages" and each.target.startswith("orchestrator."):
            assert not is_in(module_behind(each.target), forbidden), each


@pytest.mark.parametrize("name", ["torch.cuda", "pynvml", "cuda"])
def test_only_the_device_knows_the_hardware(name: str) -> None:
    found = {each.source for each in IMPORTS if each.target == name or each.target.startswith(f"{name}.")}
    # Addresses are arithmetic over the driver's calls, and know no torch: they are memory's.
    allowed = {"memory.virtual"} if name == "cuda" else set()
    assert {source for source in found if room(source) != "device"} <= allowed


def test_hardware_knows_nothing_of_models() -> None:
    for each in IMPORTS:
        if room(each.source) in ("device", "memory") and each.target.startswith("orchestrator."):
            assert room(module_behind(each.target)) not in ("engine", "modality", "stage", "stages"), each


def test_the_package_never_imports_a_plugin() -> None:
    names = {folder.name for folder in PLUGIN_FOLDERS}
    assert [each for each in IMPORTS if each.target.partition(".")[0] in names] == []


@pytest.mark.parametrize("folder", PLUGIN_FOLDERS, ids=lambda folder: folder.name)
def test_plugins_import_only_the_names_of_the_package_itself(folder: Path) -> None:
    import orchestrator

    for path in sorted((folder / folder.name).rglob("*.py")):
        for each in imports_of(path, path.stem):
            if each.target.partition(".")[0] == "orchestrator":
                assert each.target.removeprefix("orchestrator.") in orchestrator.__all__, each
            assert not (each.top and each.target.partition(".")[0] in HEAVY), each


def test_every_public_name_exists() -> None:
    import orchestrator

    assert all(getattr(orchestrator, name) is not None for name in orchestrator.__all__)
    assert callable(orchestrator.start)
    assert set(dir(orchestrator)) == {*orchestrator.__all__, "__version__"}
