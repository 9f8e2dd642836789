"""`python -m orchestrator.cache`, and values that lie in the files of the cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from orchestrator.cache import Cache, Entry
from orchestrator.cache.__main__ import main
from orchestrator.units import MiB
from tests.starts import environment
from tests.test_readme import Command, of_module


def fail(message: str) -> None:
    raise AssertionError(message)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache of three entries of 1 KiB, 2 KiB and 3 KiB."""
    with Cache(tmp_path / "cache", max_bytes=8 * MiB, warn=fail) as cache:
        for number in (1, 2, 3):
            about = {"kind": "dummy item", "modality": "image", "shape": [448, 5376]}
            tensors = {"pixels": torch.full((number * 1024,), number, dtype=torch.uint8)}
            assert cache.put(f"{number}" * 64, Entry(tensors, {"about": about} if number < 3 else {}))
    return tmp_path / "cache"


def values(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.val"), key=lambda path: path.stat().st_size)


def left(folder: Path) -> list[str]:
    with Cache(folder, max_bytes=8 * MiB, warn=fail) as cache:
        return [key[0] for key in cache.keys()]  # noqa: SIM118


def ran(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main([str(argument) for argument in arguments])
    return code, capsys.readouterr().out


def test_list_shows_what_each_entry_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = ran(capsys, "list", "--dir", folder)
    lines = text.splitlines()
    assert code == 0 and len(lines) == 4
    assert lines[0].startswith("111111111111  ") and lines[0].endswith("dummy item image 448 x 5376")
    assert lines[3].startswith("3 entries, ") and lines[3].endswith(str(folder))
    shown = json.loads(ran(capsys, "list", "--dir", folder, "--json")[1])
    assert [entry["key"][0] for entry in shown] == ["1", "2", "3"]
    assert [entry["bytes"] for entry in shown] == [path.stat().st_size for path in values(folder)]
    assert abs(shown[0]["stored_at"] - time.time()) < 600


def test_verify_names_what_is_spoilt_and_changes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(capsys, "verify", "--dir", folder) == (0, "3 of 3 entries are whole\n")
    first, second, _ = values(folder)
    os.truncate(first, first.stat().st_size - 5)
    second.unlink()
    code, text = ran(capsys, "verify", "--dir", folder)
    assert code == 1
    assert "111111111111  spoilt: its bytes are not those that were written" in text
    assert "222222222222  spoilt: its file is gone" in text
    assert text.endswith("1 of 3 entries are whole\n")
    assert first.exists()
    assert set(json.loads(ran(capsys, "verify", "--dir", folder, "--json")[1])["spoilt"]) == {"1" * 64, "2" * 64}


def test_prune_without_options_removes_what_is_spoilt(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(values(folder)[1], 10)
    code, text = ran(capsys, "prune", "--dir", folder)
    assert (code, text.splitlines()[-1], left(folder)) == (0, "removed 1 of 3 entries", ["1", "3"])


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (["--max-bytes", "4KiB"], ["3"]),
        (["--max-bytes", "5800"], ["2", "3"]),
        (["--max-bytes", "1GiB"], ["1", "2", "3"]),
        (["--older-than", "1"], ["1", "2", "3"]),
        (["--older-than", "0"], []),
        (["--all"], []),
    ],
)
def test_prune_removes_the_oldest(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], kept: list[str]
) -> None:
    code, text = ran(capsys, "prune", "--dir", folder, *options)
    assert (code, left(folder)) == (0, kept)
    assert text.splitlines()[-1] == f"removed {3 - len(kept)} of 3 entries"
    assert len(values(folder)) == len(kept)


def test_a_folder_that_is_not_there_is_the_users_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--dir", str(tmp_path / "none")]) == 2
    assert "there is no cache in" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert ran(capsys, "list", "--dir", tmp_path / "empty")[1].startswith("0 entries")
    (tmp_path / "empty/entries").mkdir()
    (tmp_path / "empty/entries/cache.db").write_bytes(b"no database" * 500)
    assert main(["verify", "--dir", str(tmp_path / "empty")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_size_that_is_none_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["prune", "--dir", str(folder), "--max-bytes", "much"])
    assert stopped.value.code == 2
    assert "not a size" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["list", "verify", "prune"])
def test_no_command_imports_torch(folder: Path, command: str) -> None:
    program = (
        "import sys; from orchestrator.cache.__main__ import main; "
        f"code = main(['{command}', '--dir', {str(folder)!r}]); "
        "sys.exit(code or ('torch' in sys.modules) or ('hydra' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", of_module("orchestrator.cache"), ids=lambda command: command.text)
def test_the_commands_of_the_readme(folder: Path, capsys: pytest.CaptureFixture[str], command: Command) -> None:
    assert ran(capsys, *command.arguments, "--dir", folder)[0] == 0


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("list", "verify", "prune"))


def test_values_lie_in_the_file_until_they_are_used(tmp_path: Path) -> None:
    with Cache(tmp_path, max_bytes=200 * MiB, warn=fail) as cache:
        cache.put("big", Entry({"pixels": torch.ones(64 * MiB, dtype=torch.uint8)}, {}))
    with Cache(tmp_path, max_bytes=200 * MiB, warn=fail) as cache:
        before = psutil.Process().memory_info().rss
        found = cache.get("big")
        assert found is not None
        assert psutil.Process().memory_info().rss - before < 16 * MiB
        assert int(found.tensors["pixels"].sum()) == 64 * MiB


def test_what_is_written_to_a_value_stays_out_of_the_file_and_outlives_its_removal(tmp_path: Path) -> None:
    kinds = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8]
    tensors = {str(dtype): torch.ones((3, 5), dtype=dtype) for dtype in kinds} | {"none": torch.empty((0, 4))}
    with Cache(tmp_path, max_bytes=MiB, warn=fail) as cache:
        cache.put("key", Entry(tensors, {}))
        first = cache.get("key")
        assert first is not None
        for name, tensor in first.tensors.items():
            assert torch.equal(tensor, tensors[name]) and tensor.dtype == tensors[name].dtype
            tensor.zero_()
        again = cache.get("key")
        assert again is not None and bool(again.tensors["torch.int64"].all())
        cache.delete("key")
        assert bool(again.tensors["torch.float32"].all())
