"""A configuration that an earlier start composed: the same, without Hydra, and only where nothing could differ."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.cache.folder import FOLDER_VARIABLE
from orchestrator.compose import Composed, compose
from orchestrator.compose.remembered import compose_or_recall
from orchestrator.errors import ConfigError
from orchestrator.registry import Registry


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def start(*overrides: str, config_dir: Path | None = None) -> Composed:
    return compose_or_recall(overrides, registry=Registry.discover(), config_dir=config_dir, environment=os.environ)


def kept(cache: Path) -> list[Path]:
    return sorted((cache / "composed").glob("*")) if cache.exists() else []


def test_it_is_the_same_and_is_kept_once(cache: Path) -> None:
    overrides = ("model=auto", "model.path=/a b/c", "gpu.util=0.5", "+stage@stages.last=clear_caches")
    first = start(*overrides)
    (file,) = kept(cache)
    written = file.stat().st_mtime_ns
    assert start(*overrides) == first == compose(overrides)
    assert [path.stat().st_mtime_ns for path in kept(cache)] == [written]
    assert start(*reversed(overrides)).config == first.config
    assert len(kept(cache)) == 2


def test_a_run_folder_is_no_part_of_it(cache: Path) -> None:
    configs = [start("gpu.util=0.5", f"run.dir=/runs/{name}").config for name in ("a", "b")]
    assert [config.run.dir for config in configs] == ["/runs/a", "/runs/b"]
    assert len(kept(cache)) == 1
    assert start("gpu.util=0.5").config.run.dir is None


def test_the_second_start_does_without_hydra(cache: Path) -> None:
    program = (
        "import os, sys; from orchestrator.compose.remembered import compose_or_recall as start; "
        "from orchestrator.registry import Registry; "
        "start(['gpu.util=0.7'], registry=Registry.discover(), config_dir=None, environment=os.environ); "
        "print(sorted({'hydra', 'omegaconf', 'torch'} & set(sys.modules)))"
    )
    said = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
        for _ in range(2)
    ]
    assert said == ["['hydra', 'omegaconf']", "[]"]


@pytest.mark.parametrize(
    "overrides",
    [
        ("run.dir=/a", "run.dir=/b"),
        ("hydra.searchpath=[]",),
        ("model.path=${oc.env:HOME}", "model=auto"),
        ("cache.enabled=false",),
        ("cache.dir=/elsewhere",),
        ("model=auto", "model.path=https://someone:secret@example.org/a"),
    ],
)
def test_what_may_come_out_otherwise_or_may_not_be_kept(overrides: tuple[str, ...], cache: Path) -> None:
    try:
        expected = compose(overrides)
    except ConfigError as error:
        with pytest.raises(ConfigError) as raised:
            start(*overrides)
        assert raised.value.problems == error.problems
    else:
        assert start(*overrides) == expected
    assert kept(cache) == []


def test_a_mistake_is_said_each_time(cache: Path) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"gpu\.utl"):
            start("gpu.utl=0.5")
    assert kept(cache) == []


def test_files_and_the_variables_that_they_name_decide(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "conf" / "model" / "mine.yaml"
    model.parent.mkdir(parents=True)
    model.write_text("defaults: [auto]\npath: ${oc.env:MINE,/one}\n")

    def path() -> str | None:
        return start("model=mine", config_dir=tmp_path / "conf").config.model.path

    assert (path(), path()) == ("/one", "/one")
    monkeypatch.setenv("MINE", "/two")
    assert (path(), len(kept(cache))) == ("/two", 2)
    model.write_text("defaults: [auto]\npath: /three\n")
    assert (path(), len(kept(cache))) == ("/three", 3)
    model.write_text("defaults: [auto]\npath: /at-${now:%f}\n")
    assert path() != path()
    assert len(kept(cache)) == 3


def test_what_cannot_be_read_is_composed_again(cache: Path) -> None:
    expected = start("gpu.util=0.5")
    (file,) = kept(cache)
    for spoilt in (b"", b"{", b"[]", b"{}", b'{"run": null}', b"\xff"):
        file.write_bytes(spoilt)
        assert start("gpu.util=0.5") == expected
        assert file.read_bytes() != spoilt


def test_no_more_than_so_many_are_kept(cache: Path) -> None:
    start("gpu.util=0.5")
    (file,) = kept(cache)
    for number in range(100):
        older = file.with_name(f"{number}.json")
        older.write_text("{}")
        os.utime(older, (number, number))
    start("gpu.util=0.6")
    assert len(kept(cache)) == 64
    assert file in kept(cache)


def test_a_folder_that_cannot_be_written_is_no_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "a file"
    place.write_text("")
    monkeypatch.setenv(FOLDER_VARIABLE, str(place))
    assert start("gpu.util=0.5").config.gpu.util == 0.5
