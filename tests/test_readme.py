"""The README is true: its commands run, its output is what comes out, its files and keys exist."""

from __future__ import annotations

import fnmatch
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from orchestrator import __version__
from orchestrator.__main__ import main
from orchestrator.compose import compose
from orchestrator.memory.ledger import ACCOUNTS
from tests.starts import BUILT_IN, ROOT, environment, run_folders

README = (ROOT / "README.md").read_text()
EXAMPLE = ROOT / "plugins/orchestrator_example"

NOT_RUN = {
    "make start": "makes an environment of 6 GB; what it starts is started here",
    ".venv/bin/python -m orchestrator.report runs/*": "reads what `make start` left; other reports are made here",
}
"""Commands that only their own words are checked of, each with the reason."""


@dataclass(frozen=True)
class Command:
    """A command of a console block, and the lines shown under it."""

    text: str
    shown: tuple[str, ...]

    @property
    def arguments(self) -> list[str]:
        return shlex.split(self.text)[3:]

    @property
    def module(self) -> str:
        return shlex.split(self.text)[2]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands() -> Iterator[Command]:
    for block in blocks("console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            text, *shown = part.splitlines()
            yield Command(text, tuple(shown))


def of_module(module: str) -> list[Command]:
    """What is run of a module. Sweeps are not: they have tests of their own."""
    asked = [each for each in commands() if each.text not in NOT_RUN and each.module == module]
    return [each for each in asked if "-m" not in each.arguments]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder and the lines of the start that the first screen shows, on the CPU."""
    folder = tmp_path_factory.mktemp("first")
    command = [sys.executable, "-m", "orchestrator", "device=cpu"]
    # Of a first start: another one's start-up plan is news.
    alone = environment() | {"ORCHESTRATOR_CACHE": str(folder / "cache")}
    done = subprocess.run(command, cwd=folder, env=alone, capture_output=True, text=True, check=True)
    return folder, done.stdout.splitlines()


def first_words(lines: list[str]) -> list[str]:
    """Names of rows: what stands before the columns."""
    return [re.split(r"\s{2,}", line)[0].removesuffix(" -") for line in lines if line.strip()]


def test_the_first_screen_shows_what_comes_out(printed: tuple[Path, list[str]]) -> None:
    lines, shown = printed[1], blocks("text")[0].splitlines()
    stages = len(BUILT_IN)
    assert first_words(shown[:stages]) == first_words(lines[:stages]) == list(BUILT_IN)
    memory, kv = (next(at for at, line in enumerate(lines) if line.startswith(head)) for head in ("memory", "KV cache"))
    expected = first_words(lines[memory:kv])
    assert first_words(shown[stages : shown.index(shown[-2])]) == expected
    assert set(ACCOUNTS) <= set(expected)
    assert no_numbers(shown[-2]) == no_numbers(lines[kv])
    assert no_numbers(shown[-1]) == no_numbers(lines[-1])


def no_numbers(line: str) -> str:
    return re.sub(r"[\d.,]*\d", "N", line)


def test_the_ledgers_lines_are_all_explained(printed: tuple[Path, list[str]]) -> None:
    lines = printed[1]
    start = next(at for at, line in enumerate(lines) if line.startswith("memory"))
    rows = first_words(lines[start + 1 : lines.index("", start)])
    assert [name for name in rows if f"| `{name}` |" not in README] == []


@pytest.mark.parametrize("command", of_module("orchestrator"), ids=lambda command: command.text)
def test_a_command_is_accepted_or_refused_as_shown(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What would start an engine is composed and checked, unless the README shows what becomes of it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "my_stage.py").write_text(python_block("MyStage"))
    starts = not command.shown and "--cfg" not in command.arguments
    code = main([*command.arguments, *(["--cfg", "job"] if starts else [])])
    out, errors = capsys.readouterr()
    assert code == (2 if command.shown else 0), errors
    for line in command.shown:
        assert line in [*out.splitlines(), *errors.splitlines()]


def test_reports_are_made(printed: tuple[Path, list[str]]) -> None:
    folder = printed[0]
    (run,) = run_folders(folder)
    for name in ("one", "other"):
        shutil.copytree(run, folder / "runs" / name)
    for command in of_module("orchestrator.report"):
        words = [sys.executable, *shlex.split(command.text)[1:]]
        done = subprocess.run(words, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert "status ok" in done.stdout
    assert (folder / "runs.html").is_file()


def test_commands_that_are_not_run_are_still_there() -> None:
    assert {each.text for each in commands()} >= set(NOT_RUN)
    tested_elsewhere = {"orchestrator.plan", "orchestrator.zygote", "orchestrator.bench", "orchestrator.rerun"}
    known = {"orchestrator", "orchestrator.report", "orchestrator.cache"} | tested_elsewhere
    assert {each.module for each in commands() if each.text not in NOT_RUN} <= known


def python_block(word: str) -> str:
    return next(block for block in blocks("python") if word in block)


def test_the_call_from_python_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(python_block("with start("), "README.md", "exec"), {})
    assert re.search(r"\d+\.\d+\n$", capsys.readouterr().out)


def test_the_example_of_serving_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(python_block(".engine.stream("), "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert re.search(r"^likeliest \(\) '.*' cancelled$", out, re.MULTILINE)
    assert re.search(r"^drawn \(\d+,\) .* (length|stop)$", out, re.MULTILINE)


def test_the_example_is_the_plugin() -> None:
    def text(path: str) -> str:
        return (EXAMPLE / path).read_text()

    assert python_block("FreeMemoryConfig") == text("orchestrator_example/free_memory.py")
    assert blocks("yaml") == [text("orchestrator_example/conf/stage/free_memory.yaml")]
    assert blocks("toml") == [text("pyproject.toml")]


def tree() -> list[Path]:
    """The paths of the annotated tree; four blanks a level."""
    paths: list[Path] = []
    above: list[str] = []
    block = next(each for each in blocks("text") if each.startswith("Makefile"))
    for line in block.splitlines():
        level = (len(line) - len(line.lstrip())) // 4
        above = [*above[:level], line.split()[0]]
        paths.append(Path(*above))
    return paths


def test_every_path_of_the_tree_exists_and_every_folder_is_in_it() -> None:
    assert [str(path) for path in tree() if not (ROOT / path).exists()] == []
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split()]

    def folders(inside: Path) -> set[str]:
        names = {path.name for path in inside.iterdir() if path.is_dir() and not path.name.startswith(".")}
        return {name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in ignored)}

    for place in (".", "orchestrator", "plugins"):
        named = {path.name for path in tree() if path.parent == Path(place)}
        assert folders(ROOT / place) <= named, place


def test_every_file_that_is_mentioned_exists() -> None:
    named = set(re.findall(r"`((?:orchestrator|conf|plugins|tests)/[\w./]+)`", README))
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_key_that_is_mentioned_exists() -> None:
    raw = compose([]).raw
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL))
    given = [word for command in commands() if not command.shown for word in shlex.split(command.text)]
    nodes = "|".join(set(raw) - {"stages"})
    keys = {match[1] for text in [*inline, *given] if (match := re.match(rf"'?((?:{nodes})(?:\.\w+)+)", text))}
    keys = {key for key in keys if not key.endswith(".json")}
    assert len(keys) > 15
    assert [key for key in sorted(keys) if not _has(raw, key.split("."))] == []


def _has(node: Any, path: list[str]) -> bool:
    for name in path:
        if not isinstance(node, dict) or name not in node:
            return False
        node = node[name]
    return True


def test_ranges_and_version_are_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    plain = re.sub(r"\s+", " ", README)
    assert f"Python {project['requires-python'].replace('>=', '>= ')};" in plain
    found = [re.fullmatch(r"([\w-]+)(.*)", each) for each in project["dependencies"]]
    ranges = {match[1]: match[2] for match in found if match}
    for name in ("torch", "transformers", "hydra-core", "pydantic"):
        spelled = ranges[name].replace(">=", ">= ").replace(",<", ", < ")
        assert f"{name} {spelled}" in plain
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert f"torch {pins['torch']}" in plain
    assert f"### {__version__}" in README
