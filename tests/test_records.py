from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from orchestrator.records import (
    SCHEMA_VERSION,
    ErrorRecord,
    ImportRecord,
    KVCacheRecord,
    LedgerRecord,
    MemoryRecord,
    RunRecord,
    Span,
    StageMemory,
    StageRecord,
    read_record,
    write_record,
)

GIB = 1024**3


def full_record() -> RunRecord:
    reading = MemoryRecord(ours_bytes=5, allocated_bytes=3, reserved_bytes=4, peak_bytes=6, free_bytes=90)
    return RunRecord(
        run_id="run-1",
        status="failed",
        started_at="2026-01-02T03:04:05.678+00:00",
        total_s=3.25,
        import_s=1.5,
        imports=[ImportRecord(package="torch", s=1.25)],
        ready_s=None,
        spans=[Span(name="imports", start_s=0.0, wall_s=1.5), Span(name="read", start_s=1.5, wall_s=1.0, beside="x")],
        overrides=["gpu.util=0.9"],
        config={"gpu": {"util": 0.9}, "mm": {"image": {"max_size": [448, 448]}}},
        versions={"torch": "2.14.1", "cuda": None},
        device={"kind": "cpu", "name": "a CPU", "host": {"cores": 2}},
        stages=[
            StageRecord(
                slot="verify",
                use="verify",
                origin="built in",
                status="failed",
                start_s=1.5,
                wall_s=1.75,
                spans=[Span(name="oracle", start_s=1.6, wall_s=0.5)],
                metrics={"requests": 4, "text": "größe"},
                memory=StageMemory(before=reading, after=reading),
                error=ErrorRecord(type="VerificationError", message="one\ntwo", traceback="..."),
            ),
            StageRecord(slot="last", use="mine:Last", origin="mine"),
        ],
        ledger=LedgerRecord(
            total_bytes=80 * GIB,
            requested_bytes=72 * GIB,
            source="nvml_process",
            accounts={"weights": 15 * GIB},
            other_processes_bytes=0,
            residual_bytes=-3,
            peak_held_bytes=16 * GIB,
        ),
        kv_cache=KVCacheRecord(
            num_gpu_blocks=64,
            block_size=16,
            bytes_per_block=1024,
            bytes=65536,
            num_tokens=1024,
            max_concurrency=1.0,
            limited_by="util",
        ),
        messages=["a neighbour left"],
        error=ErrorRecord(type="VerificationError", message="one\ntwo"),
    )


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    record = full_record()
    path = write_record(record, tmp_path)
    assert path == tmp_path / "run.json"
    assert read_record(tmp_path) == read_record(path) == record


def test_the_file_is_plain_json_with_whole_bytes(tmp_path: Path) -> None:
    value = json.loads(write_record(full_record(), tmp_path).read_text(encoding="utf-8"))
    assert value["schema_version"] == SCHEMA_VERSION
    assert value["ledger"]["total_bytes"] == 80 * GIB and isinstance(value["ledger"]["total_bytes"], int)
    assert value["stages"][1]["status"] == "not_run"


def test_a_reader_sees_a_whole_file_or_none(tmp_path: Path) -> None:
    records = [full_record().model_copy(update={"run_id": name, "messages": [name] * 5000}) for name in ("a", "b")]
    done = threading.Event()

    def write() -> None:
        for number in range(40):
            write_record(records[number % 2], tmp_path)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not done.is_set():
        try:
            record = read_record(tmp_path)
        except FileNotFoundError:
            continue
        assert record.messages == [record.run_id] * 5000
        seen.add(record.run_id)
    writer.join()
    assert seen <= {"a", "b"}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_record_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    write_record(full_record(), tmp_path)
    broken = full_record()
    broken.stages[0].metrics["object"] = object()
    with pytest.raises(ValueError, match="object"):
        write_record(broken, tmp_path)
    assert read_record(tmp_path) == full_record()
    assert len(list(tmp_path.iterdir())) == 1


def test_no_record(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_record(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_record(tmp_path / "run.json")


def rewrite(folder: Path, **changes: Any) -> None:
    path = write_record(full_record(), folder)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_another_schema_version_is_named_whatever_else_it_holds(tmp_path: Path) -> None:
    rewrite(tmp_path, schema_version=7, stages="differently", new=1)
    with pytest.raises(ValueError, match="schema version 7; this program reads version 1"):
        read_record(tmp_path)


def test_keys_that_were_added_later_are_passed_over(tmp_path: Path) -> None:
    rewrite(tmp_path, added={"later": 1})
    assert read_record(tmp_path) == full_record()


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema_version": 1}', '{"schema_version": "one"}', "\x00"])
def test_what_is_no_record_is_a_value_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match="valid"):
        read_record(tmp_path)


def test_a_misspelt_field_is_refused_where_it_is_written() -> None:
    with pytest.raises(ValueError, match="wall_seconds"):
        Span.model_validate({"name": "x", "start_s": 0.0, "wall_seconds": 1.0})
