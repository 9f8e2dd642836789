"""Reading files into the page cache, on the disk of the tests."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Event

import pytest

from orchestrator.bench.page_cache import drop
from orchestrator.beside import Beside
from orchestrator.checkpoint import weight_files_here
from orchestrator.clock import Clock
from orchestrator.read_ahead import is_cached, read_ahead
from orchestrator.stages.load_weights import LoadWeights
from orchestrator.units import MiB
from tests.toy import composed

SIZE = 72 * MiB + 5


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    # Not of holes, which are never read from a disk.
    path.write_bytes(os.urandom(SIZE))
    return path


def cached_at(path: Path, offset: int) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return is_cached(descriptor, offset)
    finally:
        os.close(descriptor)


def test_what_is_cold_is_read_and_what_is_cached_is_left(file: Path) -> None:
    if drop([file]) > 0.01:
        pytest.fail("the tests' folder must be on a disk")
    first = read_ahead([file], Event())
    assert first.read_bytes > 0 and first.read_bytes + first.cached_bytes == SIZE
    assert cached_at(file, 0) and cached_at(file, SIZE - 1)
    again = read_ahead([file], Event())
    assert (again.read_bytes, again.cached_bytes) == (0, SIZE)


def test_it_stops_when_it_is_told_to_and_where_memory_ends(file: Path) -> None:
    stopping = Event()
    stopping.set()
    stopped = read_ahead([file], stopping)
    assert (stopped.read_bytes, stopped.cached_bytes) == (0, 0)
    bounded = read_ahead([file, file], Event(), most_bytes=SIZE + 10)
    assert bounded.read_bytes + bounded.cached_bytes == SIZE + 10


def test_a_file_that_cannot_be_read_is_no_error(file: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    result = read_ahead([tmp_path / "missing", tmp_path, tmp_path / "empty", file], Event(), most_bytes=SIZE)
    assert 0 < result.read_bytes + result.cached_bytes <= SIZE


def test_the_files_of_a_model_that_is_here(file: Path) -> None:
    here = composed("model=auto", f"model.path={file.parent}").model
    assert weight_files_here(here) == (file,)
    assert weight_files_here(composed("model=auto", "model.path=/nowhere/at/all").model) == ()
    assert weight_files_here(composed("model=auto", "model.path=nobody/never-downloaded").model) == ()
    assert weight_files_here(composed().model) == ()


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("weights.io=auto", ["read ahead"]),
        ("weights.io=direct", []),
        ("weights.loader=dummy", []),
        ("model.load_format=dummy", []),
    ],
)
def test_what_is_not_to_be_read_through_the_cache_is_not_read_ahead(
    override: str, expected: list[str], tmp_path: Path
) -> None:
    beside = Beside(Clock.from_now())
    config = composed("device=cpu", "model=auto", f"model.path={tmp_path}", override)
    stage = LoadWeights(LoadWeights.Config(use="load_weights"))
    stage.begin(config, lambda group, name: pytest.fail(name), beside)
    beside.close()
    assert [span.name for span in beside.spans()] == expected
