"""`run.skip_existing`: what counts as done, and what becomes of a record that does not."""

from __future__ import annotations

from pathlib import Path

from orchestrator.records import FILE_NAME, RunRecord, write_record
from orchestrator.skipping import make_room, set_aside, valid_run
from tests.toy import composed


def leave(folder: Path, status: str, *overrides: str) -> RunRecord:
    config = composed(*overrides).model_dump(mode="json", by_alias=True)
    record = RunRecord.model_validate({"run_id": "one", "started_at": "", "status": status, "config": config})
    write_record(record, folder)
    return record


def test_a_run_of_the_same_configuration_that_succeeded_is_done(tmp_path: Path) -> None:
    record = leave(tmp_path, "ok", "gpu.util=0.5", "run.dir=elsewhere", "log.json=true")
    assert valid_run(tmp_path, composed("gpu.util=0.5", "run.skip_existing=true")) == record
    assert valid_run(tmp_path, composed("gpu.util=0.6")) is None
    assert valid_run(tmp_path / "nothing", composed("gpu.util=0.5")) is None
    assert valid_run(None, composed("gpu.util=0.5")) is None


def test_a_secret_in_the_configuration_is_compared_as_the_record_has_it(tmp_path: Path) -> None:
    given = ("model=auto", "model.path=//ann:s3cret@hub.example/model")
    leave(tmp_path, "ok", *given)
    assert valid_run(tmp_path, composed(*given)) is not None


def test_what_is_not_done_makes_room_and_is_kept(tmp_path: Path) -> None:
    where = f"not skipped: {tmp_path} has "
    leave(tmp_path, "failed")
    assert make_room(tmp_path, composed()) == f"{where}the record of a run that failed; it is kept as run.1.json"
    leave(tmp_path, "interrupted")
    assert (
        make_room(tmp_path, composed()) == f"{where}the record of a run that was interrupted; it is kept as run.2.json"
    )
    (tmp_path / FILE_NAME).write_text("{")
    assert make_room(tmp_path, composed()) == f"{where}a file that is not the record of a run; it is kept as run.3.json"
    leave(tmp_path, "ok", "gpu.util=0.5")
    assert make_room(tmp_path, composed("gpu.util=0.6")) == (
        f"{where}a run of another configuration (gpu.util 0.5 then, 0.6 now); it is kept as run.4.json"
    )
    assert make_room(tmp_path, composed()) == ""
    assert set_aside(tmp_path) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"run.{number}.json" for number in (1, 2, 3, 4)]
