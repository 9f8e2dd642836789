"""Ctrl-C and SIGTERM wherever a start is: a whole record, the right exit code, everything given back."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

import orchestrator
from orchestrator.__main__ import main
from orchestrator.errors import Interrupted
from orchestrator.records import RunRecord, read_record
from orchestrator.signals import held_back, interruptible, let_through, owns_process, second_signal

STAGES = {
    "load_weights": "LoadWeights",
    "dummy_data": "DummyData",
    "profile_run": "ProfileRun",
    "graph_capture": "GraphCapture",
    "clear_caches": "ClearCaches",
    "allocate_kv": "AllocateKV",
    "verify": "Verify",
}


def covered(record: RunRecord) -> float:
    spans = sum(span.wall_s for span in record.spans if span.beside is None)
    return spans + sum(stage.wall_s or 0.0 for stage in record.stages)


@pytest.mark.parametrize("slot", list(STAGES))
def test_in_each_stage(slot: str, tmp_path: Path) -> None:
    small = ["scheduler.max_num_batched_tokens=256", "stages.verify.num_requests=1", "stages.verify.max_tokens=2"]
    use = f"stages.{slot}.use=tests.interrupting:{STAGES[slot]}"
    assert main([use, *small, "device=cpu", f"run.dir={tmp_path / 'run'}"]) == 143
    record = read_record(tmp_path / "run")
    assert record.status == "interrupted"
    assert record.error is not None and (record.error.type, record.error.message) == ("Interrupted", "SIGTERM")
    names = list(STAGES)
    states = [stage.status for stage in record.stages]
    place = names.index(slot)
    assert set(states[:place]) <= {"ok", "skipped"}
    assert states[place:] == ["interrupted", *["not_run"] * (len(names) - place - 1)]
    assert record.ledger is not None
    assert covered(record) == pytest.approx(record.total_s, rel=2e-3)


def test_while_modules_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tests.signal_at_import", raising=False)
    arguments = ["engine.name=tests.interrupting:DuringImports", "device=cpu", f"run.dir={tmp_path / 'run'}"]
    assert main(arguments) == 130
    record = read_record(tmp_path / "run")
    assert (record.status, record.ledger) == ("interrupted", None)
    assert {stage.status for stage in record.stages} == {"not_run"}


def test_a_library_that_fails_to_clean_up_on_the_way_does_not_hide_it() -> None:
    with pytest.raises(Interrupted, match="SIGTERM"), interruptible():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            raise AttributeError("half of it is gone")
    with pytest.raises(AttributeError), interruptible():
        raise AttributeError("nobody interrupted")


def test_ctrl_c_in_a_program_of_which_the_start_is_a_part(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        orchestrator.start(
            ["stages.load_weights.use=tests.interrupting:CtrlC", "device=cpu", f"run.dir={tmp_path / 'run'}"]
        )
    record = read_record(tmp_path / "run")
    assert (record.status, record.stages[0].status) == ("interrupted", "interrupted")


def test_a_signal_is_held_back_and_comes_at_the_end() -> None:
    reached = []
    with pytest.raises(Interrupted), interruptible(), held_back():
        signal.raise_signal(signal.SIGTERM)
        reached.append("held back")
    assert reached == ["held back"]


def test_a_signal_that_was_held_back_comes_where_it_is_let_through() -> None:
    reached = []
    with interruptible(), held_back():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted), let_through():
            reached.append("nothing")
        reached.append("the rest, undisturbed")
    assert reached == ["the rest, undisturbed"]


def test_the_second_signal_is_seen_by_another_thread() -> None:
    came: list[Interrupted] = []
    with interruptible(), held_back(), second_signal(came.append):
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted), let_through():
            pass
        signal.raise_signal(signal.SIGTERM)
    assert [interrupt.exit_code for interrupt in came] == [143]


def test_nothing_is_done_to_a_program_that_handles_its_own_signals() -> None:
    before = signal.getsignal(signal.SIGINT)
    assert not owns_process()
    with held_back(), let_through(), second_signal(lambda _: None):
        assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt), held_back():
        signal.raise_signal(signal.SIGINT)
