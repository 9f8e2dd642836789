"""The whole start, from the command line to served requests, with the real engine, model and processor."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from orchestrator import Request, start
from orchestrator.__main__ import main
from orchestrator.memory.ledger import ACCOUNTS, HELD
from orchestrator.records import FILE_NAME, read_record
from orchestrator.report.text import closing_line
from orchestrator.starting import Started, StartError
from tests.starts import BUILT_IN, FEW_TOKENS, NO_BUILT_IN, SMALL, command_line, only_record, own, run_folders, statuses

CONTRACT = {
    *("schema_version", "run_id", "status", "started_at", "total_s", "import_s", "imports", "ready_s", "spans"),
    *("config", "versions", "device", "stages", "ledger", "kv_cache", "plan"),
}
TOPMOST = {"python", "torch", "cuda", "driver", "transformers", "orchestrator", "git"}


@dataclass(frozen=True)
class Ended:
    """A start in another process, after it."""

    code: int
    lines: list[str]
    errors: str
    record: dict[str, Any]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """One successful start of the command line; what it left in its folder is one run."""
    folder = tmp_path_factory.mktemp("begun")
    with command_line(folder, *SMALL, FEW_TOKENS, "cache.dir=cache of its own") as process:
        out, errors = process.communicate(timeout=240)
    (run,) = run_folders(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["cache of its own", "runs"]
    assert [path.name for path in run.iterdir()] == [FILE_NAME]
    return Ended(process.returncode, out.splitlines(), errors, json.loads((run / FILE_NAME).read_text()))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """One successful start in this process, on a cache that an earlier one has filled."""
    folder = tmp_path_factory.mktemp("served")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        start([*SMALL, "pipeline=profile_only"]).close()
        with start([*SMALL, FEW_TOKENS, "startup_plan=off"]) as started:
            yield started


def test_it_starts(begun: Ended) -> None:
    assert begun.code == 0, begun.errors
    assert begun.errors == ""
    assert begun.record["status"] == "ok"
    assert [stage["slot"] for stage in begun.record["stages"]] == list(BUILT_IN)
    assert [stage["status"] for stage in begun.record["stages"]] == ["ok"] * 3 + ["skipped"] + ["ok"] * 3
    assert {stage["origin"] for stage in begun.record["stages"]} == {"built-in"}
    assert "no graphs" in begun.record["stages"][3]["metrics"]["reason"]


def test_the_record_has_what_the_contract_names(begun: Ended) -> None:
    record = begun.record
    assert set(record) >= CONTRACT
    assert record["schema_version"] == 1
    assert set(record["versions"]) >= TOPMOST
    assert set(record["device"]) >= {"kind", "name", "total_bytes", "driver", "capability", "host"}
    assert set(record["device"]["host"]) >= {"cores", "memory_bytes"}
    assert set(record["ledger"]["accounts"]) == set(ACCOUNTS)
    for stage in record["stages"]:
        assert set(stage) >= {"slot", "use", "origin", "status", "start_s", "wall_s", "spans", "metrics", "memory"}
        assert set(stage["memory"]) >= {"before", "after"}
    for name, value in _numbers(record["ledger"], "ledger"):
        assert isinstance(value, int), name


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{name}.{key}")
    elif not isinstance(value, str):
        yield name, value


def covered(record: dict[str, Any]) -> float:
    """The share of the run that the union of its top-level intervals covers."""
    ran = [each for each in [*record["spans"], *record["stages"]] if each["start_s"] is not None]
    seconds = end = 0.0
    for first, last in sorted((each["start_s"], each["start_s"] + each["wall_s"]) for each in ran):
        seconds += max(0.0, last - max(first, end))
        end = max(end, last)
    return float(seconds / record["total_s"])


def test_the_intervals_cover_the_run(begun: Ended) -> None:
    record = begun.record
    assert 0.999 <= covered(record) <= 1
    assert 0 < record["import_s"] < record["ready_s"] < record["total_s"]


def test_the_intervals_of_a_run_that_fails_cover_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StartError) as caught:
        start([*SMALL, "pipeline=profile_only", "~stage@stages.profile_run", own("last", "Break")])
    record = caught.value.record
    assert covered(record.model_dump()) >= 0.999
    assert record.spans[-2].name == "unwinding"


def test_the_stages_add_up_to_the_time_between_the_first_and_the_last(begun: Ended) -> None:
    stages = begun.record["stages"]
    elapsed = stages[-1]["start_s"] + stages[-1]["wall_s"] - stages[0]["start_s"]
    assert sum(stage["wall_s"] for stage in stages) == pytest.approx(elapsed, rel=1e-3)
    for stage in stages:
        # What a stage did before its turn says what it ran beside.
        assert all(span["wall_s"] <= stage["wall_s"] for span in stage["spans"] if span["beside"] is None)


def test_the_ledger_adds_up(begun: Ended) -> None:
    ledger, kv = begun.record["ledger"], begun.record["kv_cache"]
    held = sum(ledger["accounts"][name] for name in HELD)
    assert held + ledger["residual_bytes"] == ledger["held_bytes"]
    peak = ledger["accounts"]["peak_activation"]
    assert held + ledger["residual_bytes"] + peak + ledger["unused_bytes"] == ledger["requested_bytes"]
    assert ledger["accounts"]["kv_cache"] == (kv["num_gpu_blocks"] + 1) * kv["bytes_per_block"]
    assert kv["num_gpu_blocks"] == 4 * 256 // 16
    assert kv["bytes"] == kv["num_gpu_blocks"] * kv["bytes_per_block"]
    assert 0 < ledger["held_bytes"] <= ledger["peak_held_bytes"] <= ledger["requested_bytes"]


def test_the_first_start_makes_the_dummy_data_and_the_second_finds_it(begun: Ended, served: Started) -> None:
    first, second = begun.record["stages"][1]["metrics"], served.record.stages[1].metrics
    assert (first["processor_calls"], first["modalities"]["image"]["cache"]) == (1, "miss")
    assert (second["processor_calls"], second["modalities"]["image"]["cache"]) == (0, "hit")
    assert first["modalities"]["image"]["tokens"] == second["modalities"]["image"]["tokens"] == 64


def test_two_photographs_at_once_stay_within_what_was_profiled(begun: Ended) -> None:
    metrics = begun.record["stages"][6]["metrics"]
    assert (metrics["requests"], metrics["images"], metrics["tokens"]) == (4, 2, 12)
    assert all(name.endswith(".jpg") for name in metrics["pictures"])
    (memory,) = metrics["memory"]
    assert 0 <= memory["peak_bytes"] <= memory["reserved_bytes"] + memory["slack_bytes"]


def test_a_line_a_stage_and_one_closing_line(begun: Ended) -> None:
    assert [line.split()[0] for line in begun.lines[: len(BUILT_IN)]] == list(BUILT_IN)
    closing = begun.lines[-1].split(", ")
    for part in ("status ok", "util 0.9", "64 blocks of 16", "1024 tokens"):
        assert part in closing
    names = ("total", "requested", "weights", "non-torch", "activation peak", "graphs", "KV", "ready in")
    assert all(any(pair.startswith(name) for pair in closing) for name in names)


def test_a_started_engine_serves_beside_another_and_both_close(served: Started) -> None:
    request = Request("one", "Name a colour.", max_tokens=4, ignore_eos=True)
    with start([*SMALL, FEW_TOKENS, "mm.limit_per_prompt.image=0", "stages.verify.num_requests=1"]) as other:
        ours, theirs = (each.engine.generate([request])[0] for each in (served, other))
        assert len(ours.token_ids) == 4
        assert ours.token_ids == theirs.token_ids
        made = other.record.stages[1].metrics
        assert (made["processor_calls"], made["modalities"]) == (0, {})
    assert other.engine.held() == {"encoder outputs": 0, "media inputs": 0, "requests": 0}
    assert served.engine.generate([request])[0].token_ids == ours.token_ids


def test_slots_are_swapped_dropped_and_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    swapped = "stages.dummy_data={use: tests.planted:Note}"
    code = main([*SMALL, "pipeline=profile_only", "~stage@stages.profile_run", swapped, own("last", "Note")])
    record = only_record(tmp_path)
    assert code == 0
    assert [(stage.slot, stage.use) for stage in record.stages] == [
        ("load_weights", "load_weights"),
        ("dummy_data", "tests.planted:Note"),
        ("last", "tests.planted:Note"),
    ]
    assert record.stages[2].metrics == {"noted": True}
    assert record.stages[2].origin == "tests.planted"


@pytest.mark.parametrize(
    ("stage", "error", "traced"), [("Break", "StageError", False), ("Crash", "ZeroDivisionError", True)]
)
def test_a_stage_that_fails_leaves_a_whole_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, error: str, traced: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*NO_BUILT_IN, own("a", "Note"), own("b", stage), own("c", "Note")]) == 1
    record = only_record(tmp_path)
    assert (record.status, statuses(record)) == ("failed", ["ok", "failed", "not_run"])
    found = record.stages[1].error
    assert found is not None and record.error == found
    assert (found.type, found.traceback is not None) == (error, traced)
    assert record.ready_s is None and record.ledger is not None
    assert closing_line(record).startswith("status failed, stopped at stage b")


def test_a_call_that_fails_carries_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StartError, match="StageError: the third wheel came off") as caught:
        start([*NO_BUILT_IN, own("b", "Break")])
    assert statuses(caught.value.record) == ["failed"]


def test_a_signal_in_a_stage_leaves_a_whole_record(tmp_path: Path) -> None:
    folders = {signum: tmp_path / signum.name for signum in (signal.SIGINT, signal.SIGTERM)}
    processes = {}
    for signum, folder in folders.items():
        folder.mkdir()
        processes[signum] = command_line(folder, *NO_BUILT_IN, own("a", "Sleep"), own("b", "Note"))
    for signum, process in processes.items():
        while not (folders[signum] / "asleep").exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        process.send_signal(signum)
        _, errors = process.communicate(timeout=60)
        record = only_record(folders[signum])
        assert (process.returncode, errors) == (128 + signum, "")
        assert (record.status, statuses(record)) == ("interrupted", ["interrupted", "not_run"])
        assert record.error is not None and record.error.message == signum.name


def test_runs_of_the_same_second_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [main([*NO_BUILT_IN, own("a", "Note")]) for _ in range(6)] == [0] * 6
    records = [read_record(folder) for folder in run_folders(tmp_path)]
    assert len({record.run_id for record in records}) == 6
