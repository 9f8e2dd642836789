"""A tracker of one's own is told of every run that began, and can break none of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator import FinishedRun, Tracker, UserError
from orchestrator.__main__ import main
from orchestrator.records import read_record
from tests.starts import NO_BUILT_IN, own

TRACK = ("+stage@stages.track=track", "stages.track.tracker=tests.test_tracking:Lines")


class Lines(Tracker):
    file: str
    absent: bool = False

    def check(self) -> None:
        if self.absent:
            raise UserError("what this tracker needs is not installed")

    def log(self, run: FinishedRun) -> str:
        with Path(self.file).open("a") as lines:
            lines.write(f"{run.status} {run.settings['gpu.util']} {run.numbers['total_s'] > 0} {run.record.exists()}\n")
            lines.write(f"{run.settings['model.path']}\n")
        return self.file


def test_it_is_told_of_runs_that_succeed_and_that_fail_and_of_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = (*TRACK, "stages.track.options.file=lines", "gpu.util=0.5", "model.path=https://ann:s3cret@host/m")
    assert main([*NO_BUILT_IN, *told]) == 0
    assert main([*NO_BUILT_IN, own("breaks", "Break"), *told]) == 1
    assert (tmp_path / "lines").read_text() == "".join(
        f"{status} 0.5 True True\nhttps://***@host/m\n" for status in ("ok", "failed")
    )


def test_one_that_fails_is_a_warning_and_the_run_is_what_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "run"
    assert main([*NO_BUILT_IN, *TRACK, f"stages.track.options.file={tmp_path}", f"run.dir={place}"]) == 0
    assert (
        f"warning: stages.track: IsADirectoryError: [Errno 21] Is a directory: '{tmp_path}'" in capsys.readouterr().out
    )
    assert read_record(place).status == "ok"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), "options.file: is required"),
        (("stages.track.options.fiel=x", "stages.track.options.file=x"), "options.fiel: there is no such key"),
        (("stages.track.options={file: x, absent: true}",), "what this tracker needs is not installed"),
        (("stages.track.tracker=json:JSONDecoder",), "json:JSONDecoder is not a subclass of orchestrator.Tracker"),
        (("stages.track.tracker=mlfow",), "there is no tracker of that name; did you mean mlflow?"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_made(
    tmp_path: Path, overrides: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {each.partition("=")[0]: each for each in (*TRACK, *overrides)}
    assert main([*NO_BUILT_IN, *given.values(), f"run.dir={tmp_path / 'run'}"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
