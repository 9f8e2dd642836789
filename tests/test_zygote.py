"""The import server with real processes: starts from it are like any other, and it survives them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import UserError
from orchestrator.records import read_record
from orchestrator.zygote import place, wire
from orchestrator.zygote.__main__ import main
from orchestrator.zygote.client import run
from tests.starts import NO_BUILT_IN, ROOT, SMALL, only_record, own

PATIENCE_S = 100.0
QUICK = (*NO_BUILT_IN, own("last", "Note"))


@dataclass(frozen=True)
class Client:
    """The command line, with an import server of its own over a copy of the sources that may be changed."""

    sources: Path
    environment: dict[str, str]

    def begin(self, folder: Path, *arguments: str, **changes: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "orchestrator.zygote", *arguments],
            cwd=folder,
            env={**self.environment, **changes},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, folder: Path, *arguments: str, **changes: str) -> tuple[int, str, str]:
        """Exit code, output, errors."""
        process = self.begin(folder, *arguments, **changes)
        output, errors = process.communicate(timeout=PATIENCE_S)
        return process.returncode, output, errors

    def status(self) -> dict[str, Any]:
        code, output, errors = self(self.sources, "status", "--json")
        assert code == 0, errors
        status: dict[str, Any] = json.loads(output)
        return status


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    base, runtime = tmp_path_factory.mktemp("z"), tmp_path_factory.mktemp("x")
    for name in ("orchestrator", "conf"):
        shutil.copytree(ROOT / name, base / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", base)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    path = os.pathsep.join(filter(None, (str(base), str(ROOT), os.environ.get("PYTHONPATH"))))
    client = Client(base, {**kept, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "XDG_RUNTIME_DIR": str(runtime)})
    code, output, errors = client(base, "start")
    assert code == 0, errors
    assert output.startswith("import server started: pid ")
    yield client
    client(base, "stop")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def asleep(client: Client, folder: Path) -> subprocess.Popen[str]:
    """A start that has come to a stage which does not end."""
    process = client.begin(folder, "run", *NO_BUILT_IN, own("last", "Sleep"))
    until((folder / "asleep").exists)
    return process


def test_a_whole_start_is_like_any_other(client: Client, tmp_path: Path) -> None:
    quick = ("stages.verify.num_requests=1", "stages.verify.max_tokens=2")
    code, output, errors = client(tmp_path, "run", *SMALL, *quick, ORCHESTRATOR_CACHE=os.environ["ORCHESTRATOR_CACHE"])
    assert (code, errors) == (0, "")
    record = only_record(tmp_path)
    assert record.status == "ok"
    assert "status ok" in output.splitlines()[-1]
    assert record.import_server is not None
    assert record.import_server.pid == client.status()["pid"]
    # Nothing of torch or transformers itself is imported again.
    assert not {part.package for each in record.imports for part in each.parts} & {"torch", "transformers"}
    assert record.spans[0].name == "request to the import server"
    spans = sum(span.wall_s for span in record.spans if span.beside is None)
    stages = sum(stage.wall_s or 0.0 for stage in record.stages)
    assert spans + stages == pytest.approx(record.total_s, rel=2e-3)


def test_what_a_start_imported_is_there_for_the_next_one(client: Client, tmp_path: Path) -> None:
    before = client.status()
    assert client(tmp_path, "run", *NO_BUILT_IN, own("last", "ImportsMore"))[0] == 0
    until(lambda: bool(client.status()["modules"] > before["modules"]))
    after = client.status()
    assert (after["pid"], after["threads"]) == (before["pid"], 1)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("gpu.utl=1",), 2, "error: gpu.utl=1: there is no such key; did you mean gpu.util?\n"),
        (("--no-such-flag",), 2, "error: unrecognized arguments: --no-such-flag; --help shows what there is\n"),
        ((*NO_BUILT_IN, own("last", "Break")), 1, ""),
        (QUICK, 0, ""),
    ],
    ids=["typo", "flag", "failed stage", "good"],
)
def test_exit_codes_and_errors_are_the_start_s(
    client: Client, tmp_path: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    assert client(tmp_path, "run", *arguments)[::2] == (code, said)


def test_help_goes_through_a_pipe(client: Client, tmp_path: Path) -> None:
    code, output, errors = client(tmp_path, "run", "--version")
    assert (code, errors) == (0, "")
    assert output.startswith("orchestrator ")


def test_folder_environment_input_and_mask_are_the_client_s(client: Client, tmp_path: Path) -> None:
    process = client.begin(
        tmp_path, "run", *NO_BUILT_IN, own("last", "Surroundings"), CUDA_VISIBLE_DEVICES="7", MINE="1"
    )
    _, errors = process.communicate("typed\n", timeout=PATIENCE_S)
    assert (process.returncode, errors) == (0, "")
    metrics = only_record(tmp_path).stages[0].metrics
    assert metrics == {
        "folder": str(tmp_path),
        "environment": {"CUDA_VISIBLE_DEVICES": "7", "MINE": "1", "OPENBLAS_NUM_THREADS": None},
        "typed": "typed",
        "cores": len(os.sched_getaffinity(0)),
    }


def test_another_environment_has_no_server(client: Client, tmp_path: Path) -> None:
    code, _, errors = client(tmp_path, "run", *QUICK, OMP_NUM_THREADS="3", OMP_SCHEDULE="static")
    assert code == 2
    assert "no import server runs for this Python and environment; python -m orchestrator.zygote start" in errors
    assert client(tmp_path, "status", OMP_SCHEDULE="static")[0] == 1
    assert client(tmp_path, "stop", OMP_SCHEDULE="static")[0] == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_to_the_client_reach_the_start(
    client: Client, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    process = asleep(client, tmp_path)
    process.send_signal(number)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code
    assert only_record(tmp_path).status == "interrupted"


def test_a_start_ends_with_its_client(client: Client, tmp_path: Path) -> None:
    process = asleep(client, tmp_path)
    process.kill()
    process.communicate()
    (run,) = (tmp_path / "runs").iterdir()
    until((run / "run.json").exists)
    assert read_record(run).status == "interrupted"
    until(lambda: not client.status()["running"])


def test_a_crash_of_a_start_leaves_the_server_standing(client: Client, tmp_path: Path) -> None:
    pid = client.status()["pid"]
    code, _, errors = client(tmp_path, "run", *NO_BUILT_IN, own("last", "Segfault"))
    assert (code, errors.splitlines()[-1]) == (139, "error: the start was ended by SIGSEGV")
    assert client.status()["pid"] == pid
    assert client(tmp_path, "run", *QUICK)[0] == 0


def test_ctrl_c_after_the_end_is_no_traceback(client: Client, tmp_path: Path) -> None:
    code, _, errors = client(tmp_path, "run", *NO_BUILT_IN, own("last", "LateCtrlC"))
    assert (code, errors) == (130, "error: the start was ended by SIGINT\n")
    assert only_record(tmp_path).status == "ok"


def test_a_closed_output_is_not_the_connection_to_the_server(client: Client, tmp_path: Path) -> None:
    start = ["-m", "orchestrator.zygote", "run", *NO_BUILT_IN, own("last", "WritesPastPython")]
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, *start]
    assert subprocess.call(command, cwd=tmp_path, env=client.environment, timeout=PATIENCE_S) == 0
    assert only_record(tmp_path).status == "ok"


def test_starts_run_side_by_side(client: Client, tmp_path: Path) -> None:
    """Each waits for the other."""
    both = [client.begin(tmp_path, "run", *NO_BUILT_IN, own("last", "Meet"), MINE=str(number)) for number in range(2)]
    for each in both:
        _, errors = each.communicate(timeout=PATIENCE_S)
        assert each.returncode == 0, errors
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_a_second_server_is_not_started(client: Client, tmp_path: Path) -> None:
    code, output, _ = client(tmp_path, "start")
    assert code == 0
    assert output.startswith(f"an import server runs already: pid {client.status()['pid']}")
    assert client(tmp_path, "serve")[0] == 2


def test_changed_sources_restart_it_and_what_runs_runs_on(client: Client, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    pid = client.status()["pid"]
    running = asleep(client, first)
    changed = client.sources / "orchestrator" / "units.py"
    changed.write_text(changed.read_text() + "\nCHANGED = True\n")
    code, _, errors = client(second, "run", *QUICK)
    assert (code, errors) == (0, f"import server: {changed} has changed; it restarts\n")
    assert client.status()["pid"] != pid
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130


def test_a_server_that_cannot_import_says_why(client: Client, tmp_path: Path) -> None:
    broken = client.sources / "orchestrator" / "pipeline.py"
    whole = broken.read_text()
    broken.write_text("1 / 0\n")
    try:
        code, _, errors = client(tmp_path, "run", *QUICK)
        assert code == 1
        assert "the import server has ended" in errors
        code, _, errors = client(tmp_path, "start")
        assert code == 1
        assert "ZeroDivisionError" in errors
    finally:
        broken.write_text(whole)
    assert client(tmp_path, "start")[0] == 0


def test_stopped_it_lets_starts_end_and_takes_no_more(client: Client, tmp_path: Path) -> None:
    process = asleep(client, tmp_path)
    code, output, _ = client(tmp_path, "stop")
    assert code == 0
    assert output.endswith("1 starts run on, then it ends\n")
    assert client(tmp_path, "run", *QUICK)[0] == 2
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 143


@pytest.mark.parametrize("owner", [os.getuid(), os.getuid() + 1])
def test_only_its_owner_is_heard(tmp_path: Path, owner: int) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as other:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        other.connect(str(tmp_path / "s"))
        accepted = wire.accept(listener, owner, 1.0)
        if owner == os.getuid():
            assert accepted is not None
            accepted.close()
        else:
            assert accepted is None
            assert wire.receive(other) == ({"refused": "the import server is another user's"}, [])


def test_a_message_that_is_cut_off_is_none() -> None:
    one, other = socket.socketpair()
    with one, other:
        one.sendall(b"\0\0\0\x09{")
        one.shutdown(socket.SHUT_WR)
        assert wire.receive(other) is None


def test_the_folder_is_its_owner_s_alone(tmp_path: Path) -> None:
    given = {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert place.folder(given).stat().st_mode & 0o777 == 0o700
    (tmp_path / "orchestrator").chmod(0o755)
    with pytest.raises(UserError, match="not a folder of this user alone"):
        place.folder(given)
    (tmp_path / "orchestrator").rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "orchestrator").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="XDG_RUNTIME_DIR moves it"):
        place.folder(given)


def test_the_socket_of_another_server_is_not_taken_for_one_s_own(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.touch()
    mine = place.OwnFile(path)
    assert mine.is_there
    path.rename(tmp_path / "elsewhere")
    assert not mine.is_there
    path.touch()
    mine.remove()
    assert path.exists()
    place.OwnFile(path).remove()
    assert not path.exists() and not place.OwnFile(path).is_there


def test_a_request_from_a_folder_that_has_been_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        with pytest.raises(UserError, match="the current folder has been deleted"):
            run(place.Place(tmp_path / "s"), [])


@pytest.mark.parametrize("seconds", ["-1", "nan", "long"])
def test_an_idle_time_is_a_number(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["start", f"--idle-s={seconds}"])
    assert end.value.code == 2
    assert f"{seconds}: must be a number of 0 or more" in capsys.readouterr().err


def test_a_folder_too_deep_for_a_socket_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    with pytest.raises(UserError, match="set XDG_RUNTIME_DIR to a shorter folder"):
        place.place_of({"XDG_RUNTIME_DIR": str(deep)})


def test_only_what_is_read_at_import_decides_which_server() -> None:
    assert place.deciding({"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "3", "PWD": "/", "LC_ALL": "C"}) == {
        "HF_HUB_OFFLINE": "1",
        "LC_ALL": "C",
    }
