from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import resource
import signal
import sqlite3
import tempfile
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.cache import Cache, Entry, fingerprint
from orchestrator.units import MiB

KEY = fingerprint({"name": "one"})
OTHER = fingerprint({"name": "other"})


def entry(value: int = 1, size: int = 64) -> Entry:
    return Entry({"pixels": torch.full((size,), value, dtype=torch.uint8)}, {"value": value})


def value_of(found: Entry | None) -> int | None:
    """The value that `entry` was made with; fails if the tensor is not all of it."""
    if found is None:
        return None
    value = int(found.meta["value"])
    assert bool((found.tensors["pixels"] == value).all())
    return value


def value_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.val"))


def disk_use(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class Warnings(list[str]):
    def __call__(self, message: str) -> None:
        self.append(message)


@pytest.fixture
def warned() -> Warnings:
    return Warnings()


@pytest.fixture
def cache(tmp_path: Path, warned: Warnings) -> Cache:
    return Cache(tmp_path / "cache", max_bytes=MiB, warn=warned)


# Fingerprints


def test_a_fingerprint_does_not_depend_on_the_order_of_names() -> None:
    first = fingerprint({"a": {"x": 1, "y": [1, 2]}, "b": None})
    assert first == fingerprint({"b": None, "a": {"y": (1, 2), "x": 1}})
    assert len(first) == 64


def test_a_fingerprint_tells_values_types_and_names_apart() -> None:
    apart: list[dict[str, Any]] = [{"a": 1}, {"a": 2}, {"a": 1.0}, {"a": True}, {"a": "1"}, {"a": [1]}, {"b": 1}, {}]
    assert len({fingerprint(parts) for parts in apart}) == len(apart)


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"a": {"b": {1, 2}}}, "fingerprint.a.b"),
        ({"a": [Path("x")]}, "fingerprint.a[0]"),
        ({"a": {1: 2}}, "fingerprint.a has the name 1"),
        ({"a": float("nan")}, "fingerprint.a is nan"),
        ({"a": torch.float32}, "torch.float32"),
    ],
)
def test_a_fingerprint_refuses_what_is_not_json_and_names_it(parts: dict[str, Any], named: str) -> None:
    with pytest.raises(TypeError) as raised:
        fingerprint(parts)
    assert named in str(raised.value)


# Values


def test_what_is_put_comes_back(cache: Cache, warned: Warnings) -> None:
    shared = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    tensors = {
        "bfloat16": torch.randn(3, 5, dtype=torch.bfloat16),
        "transposed": shared.T,
        "shared": shared,
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
    }
    assert cache.put(KEY, Entry(tensors, {"shape": (448, 448), "text": "größe", "none": None}))
    found = cache.get(KEY)
    assert found is not None
    assert found.meta == {"shape": [448, 448], "text": "größe", "none": None}
    assert found.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)
    assert warned == []


def test_an_entry_without_tensors(cache: Cache) -> None:
    cache.put(KEY, Entry({}, {"plan": [1, 2]}))
    assert cache.get(KEY) == Entry({}, {"plan": [1, 2]})


def test_meta_that_json_cannot_say_is_an_error_of_the_caller(cache: Cache) -> None:
    with pytest.raises(TypeError, match=r"meta\.where"):
        cache.put(KEY, Entry({}, {"where": Path("x")}))


def test_fetch_builds_once_and_says_what_happened(cache: Cache, tmp_path: Path, warned: Warnings) -> None:
    made = []

    def build() -> Entry:
        made.append(1)
        return Entry({}, {"shape": (1, 2)})

    assert cache.fetch(KEY, build) == (Entry({}, {"shape": [1, 2]}), "miss")
    assert cache.fetch(KEY, build) == (Entry({}, {"shape": [1, 2]}), "hit")
    with Cache(tmp_path / "cache", max_bytes=MiB, warn=warned) as again:
        assert again.fetch(KEY, build)[1] == "hit"
    assert (len(made), warned) == (1, [])


def test_an_error_of_build_passes_and_leaves_the_cache_usable(cache: Cache, warned: Warnings) -> None:
    def fail() -> Entry:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cache.fetch(KEY, fail)
    assert cache.fetch(KEY, entry)[1] == "miss"
    assert warned == []


def test_keys_sizes_and_deletion(cache: Cache, tmp_path: Path) -> None:
    assert (cache.keys(), cache.entry_bytes(KEY), cache.delete(KEY)) == ([], None, False)
    cache.put(KEY, entry(1))
    cache.put(OTHER, entry(2))
    assert cache.keys() == [KEY, OTHER]
    assert {cache.entry_bytes(key) for key in (KEY, OTHER)} == {path.stat().st_size for path in value_files(tmp_path)}
    assert cache.delete(KEY)
    assert (cache.keys(), cache.get(KEY), cache.entry_bytes(KEY)) == ([OTHER], None, None)
    assert len(value_files(tmp_path)) == 1


def test_nothing_is_created_before_something_is_written(tmp_path: Path, warned: Warnings) -> None:
    cache = Cache(tmp_path / "a/b", max_bytes=MiB, warn=warned)
    assert (cache.get(KEY), cache.keys(), cache.delete(KEY)) == (None, [], False)
    assert list(tmp_path.iterdir()) == []
    assert cache.put(KEY, entry())
    cache.close()


def test_a_cache_that_is_off_touches_no_folder(tmp_path: Path, warned: Warnings) -> None:
    cache = Cache(tmp_path / "cache", max_bytes=MiB, enabled=False, warn=warned)
    assert not cache.put(KEY, entry())
    found, outcome = cache.fetch(KEY, lambda: entry(5))
    assert (value_of(found), outcome, cache.get(KEY), warned) == (5, "off", None, [])
    assert list(tmp_path.iterdir()) == []


# Entries that are not what was written


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 7)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def overwrite_header(path: Path) -> None:
    path.write_bytes(b"x" * 30 + path.read_bytes()[30:])


def flip_a_bit_of_a_tensor(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def other_version(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(b"orchestrator-cache")] += 1
    path.write_bytes(data)


def replace_by_a_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"tensors": {}, "meta": {}}))


def replace_by_a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "spoil",
    [
        truncate,
        empty,
        overwrite_header,
        flip_a_bit_of_a_tensor,
        other_version,
        replace_by_a_pickle,
        replace_by_a_fifo,
    ],
)
def test_a_spoilt_entry_is_removed_said_and_built_again(
    cache: Cache, tmp_path: Path, warned: Warnings, spoil: Callable[[Path], None]
) -> None:
    cache.put(KEY, entry(1))
    (path,) = value_files(tmp_path)
    spoil(path)
    found, outcome = cache.fetch(KEY, lambda: entry(2))
    assert (value_of(found), outcome) == (2, "miss")
    assert len(warned) == 1 and KEY in warned[0]
    assert not path.exists()
    assert value_of(cache.get(KEY)) == 2


def test_an_entry_of_another_key_is_not_used(cache: Cache, tmp_path: Path, warned: Warnings) -> None:
    cache.put(KEY, entry(1))
    (mine,) = value_files(tmp_path)
    cache.put(OTHER, entry(2))
    (others,) = set(value_files(tmp_path)) - {mine}
    mine.write_bytes(others.read_bytes())
    assert cache.get(KEY) is None
    assert "another key" in warned[0]
    assert value_of(cache.get(OTHER)) == 2


def test_a_value_file_that_is_gone_is_a_miss(cache: Cache, tmp_path: Path) -> None:
    cache.put(KEY, entry(1))
    value_files(tmp_path)[0].unlink()
    assert cache.fetch(KEY, lambda: entry(2))[1] == "miss"
    assert value_of(cache.get(KEY)) == 2


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


def plant(folder: Path, sql: str, *values: Any) -> None:
    (database,) = folder.rglob("cache.db")
    with sqlite3.connect(database) as connection:
        connection.execute(sql, values)
    connection.close()


def test_nothing_that_is_planted_is_unpickled(cache: Cache, tmp_path: Path, warned: Warnings) -> None:
    exploded = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(exploded))
    for key in (KEY, OTHER):
        cache.put(key, entry(1))
    plant(tmp_path, "UPDATE Cache SET mode = 4, filename = NULL, value = ? WHERE key = ?", bomb, KEY)
    plant(tmp_path, "UPDATE Cache SET mode = 4 WHERE key = ?", OTHER)
    value_files(tmp_path)[-1].write_bytes(bomb)
    value_files(tmp_path)[0].write_bytes(bomb)
    row = "INSERT INTO Cache(key, raw, store_time, expire_time, access_time, size, mode, value) VALUES "
    plant(tmp_path, row + "(?, 0, 0, NULL, 0, 0, 4, ?)", bomb, bomb)
    plant(tmp_path, row + "(?, 0, 0, 1, 0, 0, 4, ?)", bomb + b"!", bomb)
    plant(tmp_path, row + "(?, 1, 0, NULL, 0, 0, 4, ?)", b"\x00" + bomb, bomb)
    plant(tmp_path, "INSERT INTO Settings VALUES (?, ?)", "disk_unknown", bomb)
    cache.close()

    with Cache(tmp_path / "cache", max_bytes=MiB, warn=warned) as again:
        assert again.keys() == [KEY, OTHER]
        assert again.entry_bytes(KEY) is None
        assert (again.get(KEY), again.get(OTHER)) == (None, None)
        assert again.fetch(KEY, lambda: entry(2, size=600 * 1024))[1] == "miss"
        assert again.put(OTHER, entry(3, size=600 * 1024))
        assert again.keys() == [OTHER]
        assert again.delete(OTHER)
    assert len(warned) == 2
    assert not exploded.exists()


def test_the_planted_pickle_would_have_been_executed_by_plain_diskcache(cache: Cache, tmp_path: Path) -> None:
    import diskcache  # type: ignore[import-untyped]

    cache.put(KEY, entry())
    cache.close()
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    plant(tmp_path, "UPDATE Cache SET mode = 4, filename = NULL, value = ? WHERE key = ?", bomb, KEY)
    with diskcache.Cache(next(tmp_path.rglob("cache.db")).parent) as plain:
        plain.get(KEY)
    assert (tmp_path / "exploded").exists()


@pytest.mark.parametrize("name", ["get", "_disk", "disk_fetch", "sqlite_journal_mode", "size_limit", "eviction_policy"])
def test_a_planted_setting_does_not_stop_the_start(cache: Cache, tmp_path: Path, warned: Warnings, name: str) -> None:
    cache.put(KEY, entry(1))
    cache.close()
    plant(tmp_path, "INSERT OR REPLACE INTO Settings VALUES (?, 'x')", name)
    with Cache(tmp_path / "cache", max_bytes=MiB, warn=warned) as again:
        assert value_of(again.fetch(KEY, lambda: entry(1))[0]) == 1
    assert len(warned) <= 1


def test_a_planted_file_name_is_neither_read_nor_removed(cache: Cache, tmp_path: Path, warned: Warnings) -> None:
    outside = tmp_path / "mine.val"
    outside.write_text("precious")
    for name in ("../../mine.val", str(outside)):
        cache.put(KEY, entry(1))
        plant(tmp_path, "UPDATE Cache SET filename = ? WHERE key = ?", name, KEY)
        assert cache.get(KEY) is None
    plant(tmp_path, "UPDATE Cache SET filename = ?", str(outside))
    cache.put(KEY, entry(1))
    assert outside.read_text() == "precious"
    assert len(warned) == 2


# Size


def test_the_cap_holds_and_the_oldest_make_room(cache: Cache, tmp_path: Path, warned: Warnings) -> None:
    keys = [fingerprint({"number": number}) for number in range(6)]
    for number, key in enumerate(keys):
        assert cache.put(key, entry(number, size=300 * 1024))
        assert disk_use(tmp_path) <= MiB
    assert cache.keys() == keys[-3:]
    assert [value_of(cache.get(key)) for key in keys[-3:]] == [3, 4, 5]
    assert warned == []


def test_a_replaced_entry_leaves_nothing_behind(cache: Cache, tmp_path: Path) -> None:
    for value in range(4):
        assert cache.put(KEY, entry(value, size=600 * 1024))
        assert len(value_files(tmp_path)) == 1
    assert value_of(cache.get(KEY)) == 3


def test_an_entry_above_the_cap_is_refused_loudly(tmp_path: Path, warned: Warnings) -> None:
    with Cache(tmp_path / "cache", max_bytes=100_000, warn=warned) as cache:
        assert cache.put(OTHER, entry(1))
        found, outcome = cache.fetch(KEY, lambda: entry(2, size=100_000))
        assert (value_of(found), outcome) == (2, "miss")
        assert len(warned) == 1 and "cache.max_bytes=100000" in warned[0] and KEY in warned[0]
        assert (cache.get(KEY), value_of(cache.get(OTHER))) == (None, 1)


def test_value_files_of_killed_writers_are_swept(cache: Cache, tmp_path: Path) -> None:
    cache.put(KEY, entry(1))
    orphan = value_files(tmp_path)[0].parent / f"{'0' * 28}.val"
    orphan.write_bytes(b"half a val")
    (tmp_path / "cache/models").mkdir()
    kept = tmp_path / "cache/models/weights.val"
    kept.touch()
    cache.put(OTHER, entry(2))
    assert (orphan.exists(), kept.exists()) == (False, True)
    assert (value_of(cache.get(KEY)), value_of(cache.get(OTHER))) == (1, 2)


# Folders that cannot be used


def test_a_folder_that_cannot_be_made(tmp_path: Path, warned: Warnings) -> None:
    (tmp_path / "file").touch()
    cache = Cache(tmp_path / "file/cache", max_bytes=MiB, warn=warned)
    assert [cache.fetch(key, entry)[1] for key in (KEY, OTHER)] == ["off", "off"]
    assert len(warned) == 1 and "going on without it" in warned[0]


def test_a_database_that_cannot_be_read(cache: Cache, tmp_path: Path, warned: Warnings) -> None:
    cache.put(KEY, entry())
    cache.close()
    next(tmp_path.rglob("cache.db")).write_bytes(b"not a database" * 1000)
    with Cache(tmp_path / "cache", max_bytes=MiB, warn=warned) as again:
        assert [again.fetch(key, entry)[1] for key in (KEY, OTHER)] == ["off", "off"]
        assert (again.keys(), again.put(KEY, entry())) == ([], False)
    assert len(warned) == 1 and str(tmp_path / "cache") in warned[0]


def test_a_path_that_diskcache_would_change(tmp_path: Path, warned: Warnings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHE_ELSEWHERE", str(tmp_path / "elsewhere"))
    cache = Cache(tmp_path / "$CACHE_ELSEWHERE", max_bytes=MiB, warn=warned)
    assert cache.fetch(KEY, entry)[1] == "off"
    assert len(warned) == 1
    assert not (tmp_path / "elsewhere").exists()


# Several processes. The children are forked from a server that has torch imported already.


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "safetensors.torch", "diskcache", "filelock", "orchestrator.cache"])
    return context


def read_only_child(folder: Path, results: Any) -> None:
    if os.geteuid() == 0:
        os.setuid(65534)
    warned = Warnings()
    cache = Cache(folder, max_bytes=MiB, warn=warned)
    outcomes = [cache.fetch(key, lambda: entry(4)) for key in (KEY, OTHER)]
    results.put(([value_of(found) for found, _ in outcomes], [outcome for _, outcome in outcomes], list(warned)))


@pytest.mark.parametrize("filled", [False, True])
def test_a_read_only_folder(processes: ForkServerContext, filled: bool) -> None:
    # Not tmp_path: its parents are closed to the user that the child becomes.
    with tempfile.TemporaryDirectory() as room:
        folder = Path(room, "cache")
        folder.mkdir()
        if filled:
            with Cache(folder, max_bytes=MiB, warn=Warnings()) as cache:
                cache.put(KEY, entry(4))
        Path(room).chmod(0o755)
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        results = processes.SimpleQueue()
        child = processes.Process(target=read_only_child, args=(folder, results))
        child.start()
        values, outcomes, warned = results.get()
        child.join()
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755)
    # What is there is used, although nothing can be written, not even a lock.
    assert (values, outcomes) == ([4, 4], ["hit" if filled else "off", "off"])
    assert len(warned) == 1 and "going on without it" in warned[0]


def full_disk_child(folder: Path, results: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    warned = Warnings()
    with Cache(folder, max_bytes=MiB, warn=warned) as cache:
        first, outcome = cache.fetch(KEY, lambda: entry(1, size=500_000))
        results.put((value_of(first), outcome, cache.put(OTHER, entry(2)), list(warned)))


def test_a_full_disk(processes: ForkServerContext, tmp_path: Path) -> None:
    results = processes.SimpleQueue()
    child = processes.Process(target=full_disk_child, args=(tmp_path, results))
    child.start()
    value, outcome, kept, warned = results.get()
    child.join()
    assert (value, outcome, kept, len(warned)) == (1, "miss", False, 1)
    assert value_files(tmp_path) == []


def building_child(folder: Path, start: Any, results: Any) -> None:
    def build() -> Entry:
        time.sleep(0.2)
        return entry(os.getpid() % 251)

    warned = Warnings()
    start.wait()
    with Cache(folder / "cache", max_bytes=MiB, warn=warned) as cache:
        found, outcome = cache.fetch(KEY, build)
    results.put((value_of(found), outcome, list(warned)))


def test_eight_processes_at_once_build_once(processes: ForkServerContext, tmp_path: Path) -> None:
    start, results = processes.Barrier(8), processes.SimpleQueue()
    children = [processes.Process(target=building_child, args=(tmp_path, start, results)) for _ in range(8)]
    for child in children:
        child.start()
    got = [results.get() for _ in children]
    for child in children:
        child.join()
    assert sorted(outcome for _, outcome, _ in got) == ["hit"] * 7 + ["miss"]
    assert len({value for value, _, _ in got}) == 1
    assert [warned for _, _, warned in got if warned] == []


def dying_child(folder: Path) -> None:
    def build() -> Entry:
        os.kill(os.getpid(), signal.SIGKILL)
        return entry()

    Cache(folder, max_bytes=MiB, warn=Warnings()).fetch(KEY, build)


def test_the_lock_dies_with_its_holder(processes: ForkServerContext, cache: Cache, warned: Warnings) -> None:
    child = processes.Process(target=dying_child, args=(cache.folder,))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert cache.fetch(KEY, lambda: entry(2))[1] == "miss"
    assert (value_of(cache.get(KEY)), warned) == (2, [])


def test_a_builder_that_hangs_is_not_waited_for_forever(tmp_path: Path, warned: Warnings) -> None:
    def build() -> Entry:
        impatient = Cache(tmp_path, max_bytes=MiB, warn=warned, wait_s=0.1)
        found, outcome = impatient.fetch(KEY, lambda: entry(2))
        assert (value_of(found), outcome) == (2, "off")
        return entry(1)

    with Cache(tmp_path, max_bytes=MiB, warn=warned) as cache:
        assert cache.fetch(KEY, build)[1] == "miss"
    assert len(warned) == 1


def writing_child(folder: Path, started: Any) -> None:
    torch.set_num_threads(1)
    with Cache(folder, max_bytes=8 * MiB, warn=Warnings()) as cache:
        started.set()
        for value in range(1, 10_000):
            cache.put(KEY, entry(value % 251, size=2 * MiB))


def test_kill_during_a_write_leaves_the_old_or_the_new_value(
    processes: ForkServerContext, tmp_path: Path, warned: Warnings
) -> None:
    pauses = random.Random(0)
    folder = tmp_path / "cache"
    with Cache(folder, max_bytes=8 * MiB, warn=warned) as cache:
        cache.put(KEY, entry(0, size=2 * MiB))
    for _ in range(6):
        started = processes.Event()
        child = processes.Process(target=writing_child, args=(folder, started))
        child.start()
        started.wait()
        time.sleep(pauses.uniform(0.05, 0.3))
        child.kill()
        child.join()
        with Cache(folder, max_bytes=8 * MiB, warn=warned) as cache:
            assert value_of(cache.get(KEY)) is not None
            assert cache.put(OTHER, entry(1))
            assert len(value_files(folder)) == len(cache.keys()) == 2
    assert warned == []
