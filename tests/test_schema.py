"""`run.schema.json` is what the records say, and real records are what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from orchestrator.__main__ import main
from orchestrator.records import FILE_NAME
from orchestrator.report.__main__ import main as report
from orchestrator.schema import generated, schema_text
from tests.gpu.run import CASES
from tests.gpu.sources import read_records
from tests.starts import FEW_TOKENS, NO_BUILT_IN, SMALL, own

SCHEMA = json.loads(schema_text())
DROPPED_FOR_GPU_RECORDS = {"run_id"}


def problems(record: Any, schema: dict[str, Any] = SCHEMA) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(record)]


def test_the_file_is_what_the_records_say() -> None:
    refresh = "refresh it: python -m orchestrator.schema > orchestrator/run.schema.json"
    assert generated() == SCHEMA, f"orchestrator/run.schema.json is older than orchestrator/records.py; {refresh}"
    Draft202012Validator.check_schema(SCHEMA)


def test_a_run_and_a_failed_run_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, FEW_TOKENS, "run.dir=whole"]) == 0
    assert main([*NO_BUILT_IN, own("breaks", "Break"), "run.dir=failed"]) == 1
    for name, status in (("whole", "ok"), ("failed", "failed")):
        record = json.loads((tmp_path / name / FILE_NAME).read_text())
        assert (record["status"], problems(record)) == (status, [])
        assert problems({**record, "a_later_key": 1}) == []
        assert problems({**record, "status": "fine"}) and problems({**record, "schema_version": 2})
        assert problems({**record, "total_s": "1"}) and problems({**record, "stages": [{"slot": "a"}]})


@pytest.mark.parametrize("name", [case.name for case in CASES if case.program is None])
def test_records_of_a_gpu_are_valid_but_for_what_they_leave_out(name: str) -> None:
    required = [key for key in SCHEMA["required"] if key not in DROPPED_FOR_GPU_RECORDS]
    record = read_records().get(name)
    assert record is None or problems(record["result"], {**SCHEMA, "required": required}) == []


def test_the_report_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(["--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA
    assert report([]) == 2
    assert "give the folder of a run" in capsys.readouterr().err
