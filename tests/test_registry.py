"""Names to classes: three origins, one door."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.errors import PluginError, UnknownNameError
from orchestrator.registry import Plugin, Registry
from orchestrator.registry_cli import main

STAGE = """
from orchestrator import Context, Stage

class {name}(Stage):
    def run(self, ctx: Context) -> None:
        return None
"""


def checkout_plugin(checkout: Path, folder: str, entries: dict[str, dict[str, str]], **modules: str) -> Path:
    """A plugin in `checkout/plugins`; `modules` are its files, by module name."""
    root = checkout / "plugins" / folder
    root.mkdir(parents=True)
    tables = [
        f'[project.entry-points."orchestrator.{group}"]\n'
        + "".join(f'{name} = "{value}"\n' for name, value in names.items())
        for group, names in entries.items()
    ]
    (root / "pyproject.toml").write_text("\n".join(tables))
    for name, text in modules.items():
        (root / f"{name}.py").write_text(text)
    return root


def install(site: Path, name: str, entries: dict[str, dict[str, str]]) -> None:
    """What an installer leaves: a dist-info folder with entry points."""
    folder = site / f"{name}-2.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n")
    sections = [
        f"[orchestrator.{group}]\n" + "".join(f"{key} = {value}\n" for key, value in names.items())
        for group, names in entries.items()
    ]
    (folder / "entry_points.txt").write_text("\n".join(sections))


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of sys.path that the test may add to."""
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_three_origins_have_one_door(tmp_path: Path) -> None:
    checkout_plugin(tmp_path, "local", {"stages": {"here": "reg_local:Here"}}, reg_local=STAGE.format(name="Here"))
    site = tmp_path / "site"
    install(site, "reg-there", {"stages": {"there": "reg_there:There"}})
    (site / "reg_there.py").write_text(STAGE.format(name="There"))
    sys.path.append(str(site))
    registry = Registry.discover(tmp_path)
    assert {"verify", "here", "there"} <= set(registry.names("stages"))
    assert [registry.origin("stages", name) for name in ("verify", "here", "there")] == [
        "built-in",
        "plugins/local",
        "reg-there 2.0",
    ]
    assert registry.resolve("stages", "here").__name__ == "Here"
    assert registry.resolve("stages", "there").__name__ == "There"


def test_a_plugin_that_is_not_named_is_not_imported(tmp_path: Path) -> None:
    checkout_plugin(tmp_path, "broken", {"stages": {"broken": "reg_broken:X"}}, reg_broken="raise RuntimeError('no')")
    registry = Registry.discover(tmp_path)
    assert registry.has("stages", "broken")
    with pytest.raises(PluginError, match=r"'broken' of plugins/broken: importing reg_broken failed: RuntimeError: no"):
        registry.resolve("stages", "broken")


def test_the_same_plugin_found_twice_is_one() -> None:
    plugins = [Plugin("stages", "a", "m:A", "plugins/a"), Plugin("stages", "a", "m:A", "a 1.0")]
    assert Registry(plugins).origin("stages", "a") == "plugins/a"


def test_one_name_for_two_things_names_both_origins() -> None:
    with pytest.raises(PluginError, match=r"m:A from plugins/a and n:A from b 1\.0"):
        Registry([Plugin("stages", "a", "m:A", "plugins/a"), Plugin("stages", "a", "n:A", "b 1.0")])


def test_a_built_in_cannot_be_replaced_in_silence(tmp_path: Path) -> None:
    checkout_plugin(tmp_path, "mine", {"stages": {"verify": "mine:Verify"}})
    with pytest.raises(PluginError, match=r"'verify'.*built-in.*plugins/mine"):
        Registry.discover(tmp_path)


def test_an_unknown_name_has_a_near_miss() -> None:
    with pytest.raises(UnknownNameError, match=r"there is no stage of that name; did you mean verify\?"):
        Registry.discover().resolve("stages", "verfy")


def test_a_reference_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "reg_own.py").write_text(STAGE.format(name="Own"))
    sys.path.append(str(tmp_path))
    registry = Registry.discover()
    assert registry.resolve("stages", "reg_own:Own").__name__ == "Own"
    assert registry.origin("stages", "reg_own:Own") == "reg_own"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("json:JSONDecoder", "json:JSONDecoder, is not a subclass of orchestrator.Stage"),
        ("json:Nothing", "json has no 'Nothing'"),
        ("reg_no_such_module:X", "importing reg_no_such_module failed: ModuleNotFoundError"),
    ],
)
def test_what_cannot_be_a_stage_is_named(value: str, why: str) -> None:
    with pytest.raises(PluginError, match=why):
        Registry.discover().resolve("stages", value)


def test_a_declaration_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "plugins/torn").mkdir(parents=True)
    (tmp_path / "plugins/torn/pyproject.toml").write_text("[project\n")
    with pytest.raises(PluginError, match=r"plugins/torn/pyproject\.toml cannot be read"):
        Registry.discover(tmp_path)


def test_configuration_folders_are_found_without_importing(tmp_path: Path) -> None:
    root = checkout_plugin(tmp_path, "local", {"conf": {"local": "reg_pkg:conf"}})
    with pytest.raises(PluginError, match="there is no folder"):
        Registry.discover(tmp_path).conf_dirs()
    (root / "reg_pkg/conf").mkdir(parents=True)
    (root / "reg_pkg/__init__.py").write_text("raise RuntimeError('imported')")
    assert root / "reg_pkg/conf" in Registry.discover(tmp_path).conf_dirs()


def test_a_spawned_process_sees_a_plugin_of_the_checkout(tmp_path: Path) -> None:
    checkout_plugin(tmp_path, "local", {"stages": {"here": "reg_spawned:Here"}}, reg_spawned=STAGE.format(name="Here"))
    (tmp_path / "parent.py").write_text(
        "import multiprocessing, sys\n"
        "from pathlib import Path\n"
        "from orchestrator.registry import Registry\n"
        "def child(queue, cls):\n"
        "    queue.put((cls.__module__, 'torch' in sys.modules))\n"
        "if __name__ == '__main__':\n"
        "    cls = Registry.discover(Path(sys.argv[1])).resolve('stages', 'here')\n"
        "    spawn = multiprocessing.get_context('spawn')\n"
        "    queue = spawn.Queue()\n"
        "    process = spawn.Process(target=child, args=(queue, cls))\n"
        "    process.start()\n"
        "    print(queue.get(timeout=60))\n"
        "    process.join()\n"
    )
    command = [sys.executable, str(tmp_path / "parent.py"), str(tmp_path)]
    here = str(Path(__file__).resolve().parent.parent)
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": here, "PATH": ""}, check=False)
    assert done.stdout == "('reg_spawned', False)\n", done.stderr


def test_the_list_names_origin_and_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 0
    listed = {(entry["group"], entry["name"]): entry for entry in json.loads(capsys.readouterr().out)}
    assert listed["stages", "verify"]["where"] == "orchestrator.stages.verify:Verify"
    assert listed["stages", "free_memory"]["origin"] == "plugins/orchestrator_example"


def test_one_plugin_is_shown_with_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["free_memory"]) == 0
    assert "at_least_bytes: a whole number at least 0; default 0" in capsys.readouterr().out
    assert main(["free_memry"]) == 2
    assert "did you mean free_memory?" in capsys.readouterr().err


def test_every_built_in_can_be_resolved() -> None:
    registry = Registry.discover()
    for plugin in registry.plugins():
        if plugin.origin == "built-in":
            assert registry.resolve(plugin.group, plugin.name) is not None
