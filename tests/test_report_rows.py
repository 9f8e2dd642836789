from __future__ import annotations

import csv
import io
from pathlib import Path

import pandas as pd
import pytest

from orchestrator.records import RunRecord, write_record
from orchestrator.report.__main__ import main
from orchestrator.report.flat import as_csv, as_markdown, numbers
from orchestrator.units import GiB, MiB
from tests.test_report import failed_run, ok_run, tiny_run, unstarted_run


def rows_of(records: list[RunRecord]) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(as_csv(records))))


def test_csv_has_a_line_a_run_and_bytes_as_integers() -> None:
    big, tiny = rows_of([ok_run(), tiny_run()])
    assert (big["run_id"], tiny["run_id"]) == ("big-1", "tiny-2")
    assert int(big["ledger.accounts.weights"]) == 15 * GiB and int(tiny["ledger.accounts.weights"]) == 13 * MiB
    assert int(big["kv_cache.num_gpu_blocks"]) == 27136
    assert float(big["stages.load_weights.wall_s"]) == 4.0


def test_csv_has_the_settings_that_differ_or_were_given() -> None:
    first, second = ok_run(), ok_run()
    second.config = {**second.config, "kv": {"bytes": "need"}}
    first.overrides = second.overrides = ["gpu.util=0.9"]
    row = rows_of([first, second])[1]
    assert row["kv.bytes"] == "need" and row["gpu.util"] == "0.9"
    assert "model.name" not in row


def test_a_run_that_failed_has_a_row_with_its_error_and_no_numbers_it_never_had() -> None:
    rows = rows_of([ok_run(), failed_run(), unstarted_run()])
    assert [row["status"] for row in rows] == ["ok", "failed", "interrupted"]
    assert "DeviceOutOfMemoryError" in rows[1]["error"]
    assert rows[1]["kv_cache.num_gpu_blocks"] == "" and rows[2]["ledger.total_bytes"] == ""
    assert "kv_cache.bytes" not in numbers(failed_run())


def test_csv_is_what_pandas_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for index, run in enumerate((ok_run(), tiny_run())):
        folder = tmp_path / str(index)
        folder.mkdir()
        write_record(run, folder)
    assert main([str(tmp_path), "--csv"]) == 0
    frame = pd.read_csv(io.StringIO(capsys.readouterr().out), index_col="run_id")
    assert frame["ledger.accounts.kv_cache"].tolist() == [53 * GiB, 8 * MiB]


def test_markdown_shows_what_differs_in_units_for_people() -> None:
    lines = as_markdown([ok_run(), tiny_run()]).splitlines()
    header = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert header[:2] == ["run", "status"] and "model.name" in header and "ledger.accounts.weights" in header
    # The same in both, and no column of its own.
    assert "ledger.accounts.context" not in header
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells[header.index("ledger.accounts.weights")] == "15.00 GiB"
    assert cells[header.index("kv_cache.num_gpu_blocks")] == "27,136"
    assert len({line.count("|") for line in lines}) == 1


def test_markdown_of_one_run_has_every_account_that_holds_something() -> None:
    header = as_markdown([ok_run()]).splitlines()[0]
    assert "ledger.accounts.context" in header and "ledger.accounts.workspace" not in header


def test_a_bar_in_a_value_ends_no_cell() -> None:
    run = ok_run()
    run.run_id = "a|b"
    assert "a\\|b" in as_markdown([run])


def test_one_format_at_a_time(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path), "--csv", "--md"])
    assert stopped.value.code == 2
