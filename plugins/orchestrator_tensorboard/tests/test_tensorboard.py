"""Runs, also failed ones, arrive as events that TensorBoard reads; a tracker that fails does not change the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.__main__ import main
from orchestrator.compose import compose
from orchestrator.records import read_record
from tests.starts import NO_BUILT_IN, own

TRACK = "+stage@stages.track=tensorboard"


# TensorBoard's generated code and its stand-in for TensorFlow use what others have deprecated.
@pytest.mark.filterwarnings("ignore")
def test_a_failed_run_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    assert main([*NO_BUILT_IN, own("breaks", "Break"), TRACK, "stages.track.options.dir=events", "run.dir=one"]) == 1
    record = read_record(tmp_path / "one")
    events = EventAccumulator(str(tmp_path / "events" / record.run_id))
    events.Reload()
    assert events.Scalars("total_s")[0].value == pytest.approx(record.total_s)
    assert record.ledger is not None
    assert events.Scalars("ledger/total_bytes")[0].value == pytest.approx(record.ledger.total_bytes)
    assert "run.json/text_summary" in events.Tags()["tensors"]


@pytest.mark.filterwarnings("ignore")
def test_a_tracker_that_fails_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert (
        main([*NO_BUILT_IN, TRACK, f"stages.track.options.dir={tmp_path / 'file'}", f"run.dir={tmp_path / 'a'}"]) == 0
    )
    assert f"the record is in {tmp_path / 'a'}" in capsys.readouterr().out
    assert read_record(tmp_path / "a").status == "ok"


def test_its_defaults_are_its_files() -> None:
    from orchestrator_tensorboard.tracker import TensorBoardTracker

    assert compose([TRACK]).raw["stages"]["track"]["options"] == TensorBoardTracker().model_dump()
