"""The command line as a user calls it: another process, its exit code, its words, what it leaves on disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from orchestrator import __version__
from orchestrator.__main__ import main
from orchestrator.errors import Interrupted
from orchestrator.events import JsonEvents, TextEvents
from orchestrator.records import read_record
from orchestrator.signals import interruptible

ROOT = Path(__file__).resolve().parent.parent


def command(*arguments: str, flags: tuple[str, ...] = ()) -> list[str]:
    return [sys.executable, *flags, "-m", "orchestrator", *arguments]


def environment(**extra: str) -> Mapping[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", **extra}


def run(folder: Path, *arguments: str, flags: tuple[str, ...] = (), **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments, flags=flags),
        cwd=folder,
        env=environment(**extra),
        capture_output=True,
        text=True,
        check=False,
    )


def imported(log: str) -> set[str]:
    """The packages in the output of `-X importtime`."""
    lines = [line for line in log.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--help",), 0),
        (("--cfg", "job"), 0),
        (("gpu.utl=0.5",), 2),
        (("model=auto", "gpu.util=???", "run.seed=???"), 2),
        (("stages.verify.num_request=2",), 2),
    ],
)
def test_what_needs_no_device_imports_none_of_the_heavy_packages(
    tmp_path: Path, arguments: tuple[str, ...], code: int
) -> None:
    done = run(tmp_path, *arguments, flags=("-X", "importtime"))
    assert done.returncode == code, done.stderr
    packages = imported(done.stderr)
    assert "hydra" in packages
    assert not packages & {"torch", "transformers", "PIL", "numpy", "diskcache", "safetensors"}
    assert list(tmp_path.iterdir()) == []


def test_help_describes_this_program(tmp_path: Path) -> None:
    text = run(tmp_path, "--help", "model=auto").stdout
    for part in ("python -m orchestrator.report", "gpu.util is the share", "Exit codes", "model: auto", "path: ???"):
        assert part in text


def test_mistakes_are_lines_on_stderr_and_exit_2(tmp_path: Path) -> None:
    done = run(tmp_path, 'gpu.util="0.5"', "model=tiny_intrnvl")
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    assert lines[0] == "error: model=tiny_intrnvl: there is no model of that name; did you mean tiny_internvl?"
    assert lines[1].startswith("error: gpu.util='0.5': must be a number")
    assert len(lines) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_flag_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "--verbos")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")


def test_the_version(tmp_path: Path) -> None:
    assert run(tmp_path, "--version").stdout == f"orchestrator {__version__}\n"


def test_the_configuration_is_printed_with_overrides_before_and_after_the_flag(tmp_path: Path) -> None:
    done = run(tmp_path, "gpu.util=0.5", "--cfg", "job", "run.dir=/a b#c", "--package", "gpu")
    assert done.stdout == "# @package gpu\nutil: 0.5\nindex: 0\ntotal_bytes: null\nspec: null\n", done.stderr
    assert (
        run(tmp_path, "--cfg", "job", "-p", "run", "run.dir=/a b#~(c)=d").stdout.splitlines()[1] == "dir: /a b#~(c)=d"
    )
    assert run(tmp_path, "--cfg", "job", "gpu.utl=1").returncode == 2


def test_hydra_shows_the_folders_that_are_searched(tmp_path: Path) -> None:
    done = run(tmp_path, "--info", "searchpath")
    assert done.returncode == 0
    assert str(ROOT / "conf") in done.stdout
    assert "orchestrator_example/conf" in done.stdout


def test_a_sweep_refuses_what_all_points_share_and_creates_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "gpu.util=0.5,0.6", "run.seed=x")
    assert done.returncode == 2
    assert "run.seed=x" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_bad_point_is_a_failed_record_and_not_the_end(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "gpu.util=3,4", "model=tiny_internvl,nope", "hydra.sweep.dir=sweep")
    assert done.returncode == 2
    records = [read_record(tmp_path / "sweep" / str(number)) for number in range(4)]
    assert [record.status for record in records] == ["failed"] * 4
    errors = [record.error.message if record.error else "" for record in records]
    assert errors[0] == "gpu.util=3: must be a number above 0 and at most 1"
    assert errors[1].startswith("model=nope: there is no model of that name; there are: auto, internvl2_5_8b, ")
    assert records[2].overrides == ["gpu.util=4", "model=tiny_internvl"]
    assert records[2].config["gpu"]["util"] == 4


@pytest.mark.parametrize("events_class", [TextEvents, JsonEvents])
def test_a_reader_that_has_gone_does_not_end_a_run(events_class: type[TextEvents | JsonEvents]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        events = events_class(stream)
        events.info("nobody reads this")
        events.stage("load_weights", "ok", 1.0, "nor this")


def test_a_current_folder_that_has_been_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["device=cpu"]) == 2
    assert capsys.readouterr().err == "error: the current folder has been deleted; change to one that exists\n"


def test_a_signal_during_composition_ends_quietly(tmp_path: Path) -> None:
    slow = tmp_path / "plugin"
    slow.mkdir()
    (slow / "slow_stage.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(60)\n")
    for signum in (signal.SIGINT, signal.SIGTERM):
        process = subprocess.Popen(
            command("stages.verify.use=slow_stage:Slow"),
            cwd=slow,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(signum)
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (128 + signum, "")


def test_the_first_signal_interrupts_and_later_ones_do_not_cut_short_what_unwinds() -> None:
    before = signal.getsignal(signal.SIGTERM)
    unwound = False
    with pytest.raises(Interrupted) as raised, interruptible():
        try:
            signal.raise_signal(signal.SIGTERM)
            time.sleep(60)
        finally:
            signal.raise_signal(signal.SIGTERM)
            unwound = True
    assert unwound
    assert raised.value.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is before
