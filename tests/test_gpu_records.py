"""The committed records of runs on a GPU: whole, successful, and made by a command that still exists."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.run import CASES
from tests.gpu.sources import read_records, sources_hash

RECORDS = read_records()
STARTS = [name for name, record in RECORDS.items() if "ledger" in (record["result"] or {})]


def test_the_hash_follows_the_sources(tmp_path: Any) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "a.yaml").write_text("a: 1\n")
    before = sources_hash(tmp_path)
    (tmp_path / "conf" / "a.yaml").write_text("a: 2\n")
    assert sources_hash(tmp_path) != before


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_of_a_case_that_succeeded(name: str) -> None:
    record = RECORDS[name]
    case = next(case for case in CASES if case.name == name)
    assert record["command"] == case.shown()
    assert record["exit_code"] == 0
    assert len(record["sources"]) == 64


@pytest.mark.parametrize("name", STARTS)
def test_a_start_on_a_gpu_kept_its_promise(name: str) -> None:
    result = RECORDS[name]["result"]
    ledger = result["ledger"]
    assert result["status"] == "ok"
    assert result["stages"][-1]["slot"] == "verify" and result["stages"][-1]["status"] == "ok"
    held = sum(size for account, size in ledger["accounts"].items() if account != "peak_activation")
    assert ledger["held_bytes"] == held + ledger["residual_bytes"]
    if ledger["accounts"]["kv_cache"] and result["kv_cache"]["limited_by"] == "util":
        assert ledger["peak_held_bytes"] <= ledger["requested_bytes"]
