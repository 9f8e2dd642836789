"""Runs, also failed ones, arrive in a local store of MLflow; what is wrong with the options is said before a start."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock

from orchestrator import FinishedRun
from orchestrator.__main__ import main
from orchestrator.compose import compose
from tests.starts import NO_BUILT_IN, own

TRACK = "+stage@stages.track=mlflow"


# What MLflow's own database code has SQLAlchemy warn about is not this project's.
@pytest.mark.filterwarnings("ignore")
def test_a_run_and_a_failed_run_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path / 'runs.db'}"
    options = (f"stages.track.options.uri={uri}", "stages.track.options.experiment=mine")
    assert main([*NO_BUILT_IN, TRACK, *options, "run.dir=one"]) == 0
    assert main([*NO_BUILT_IN, own("breaks", "Break"), TRACK, *options, "run.dir=two"]) == 1
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("mine")
    assert experiment is not None
    failed, ok = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"])
    assert (ok.info.status, failed.info.status) == ("FINISHED", "FAILED")
    assert ok.data.params["device.kind"] == "cpu" and ok.data.metrics["total_s"] > 0
    assert "stages.breaks.wall_s" in failed.data.metrics
    assert [each.path for each in client.list_artifacts(failed.info.run_id)] == ["run.json"]


@pytest.mark.filterwarnings("ignore")
def test_runs_that_end_at_once_open_a_file_one_after_the_other(tmp_path: Path) -> None:
    from orchestrator_mlflow.tracker import MLflowTracker, lock_path

    (tmp_path / "file").write_text("")
    tracker = MLflowTracker(uri=f"sqlite:///{tmp_path}/file/runs.db")
    run = FinishedRun("one", "ok", tmp_path, {}, {})
    with pytest.raises(FileExistsError):
        tracker.log(run)
    with ThreadPoolExecutor(1) as other, FileLock(lock_path()) as lock:
        told = other.submit(tracker.log, run)
        with pytest.raises(TimeoutError):
            told.result(1)
        lock.release()
        assert isinstance(told.exception(60), FileExistsError)


def test_a_misspelt_option_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*NO_BUILT_IN, TRACK, "stages.track.options.uir=x", f"run.dir={tmp_path / 'new'}"]) == 2
    assert "the tracker mlflow: options.uir: there is no such key; did you mean uri?" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_it_is_off_by_default_and_its_defaults_are_its_files() -> None:
    assert "track" not in compose([]).raw["stages"]
    from orchestrator_mlflow.tracker import MLflowTracker

    assert compose([TRACK]).raw["stages"]["track"]["options"] == MLflowTracker().model_dump()
