from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from orchestrator.records import (
    ErrorRecord,
    ImportRecord,
    KVCacheRecord,
    LedgerRecord,
    RunRecord,
    Span,
    StageRecord,
    write_record,
)
from orchestrator.report.__main__ import main
from orchestrator.report.compare import compare, differing
from orchestrator.report.html import page
from orchestrator.report.text import closing_line, table
from orchestrator.units import GiB, MiB


def stage(slot: str, start_s: float, wall_s: float, **fields: object) -> StageRecord:
    values = {"slot": slot, "use": slot, "origin": "built in", "status": "ok", "start_s": start_s, "wall_s": wall_s}
    return StageRecord.model_validate(values | fields)


def ok_run() -> RunRecord:
    """80 GiB, of which 0.9 are requested."""
    accounts = {
        "weights": 15 * GiB,
        "context": GiB // 2,
        "non_torch": GiB // 4,
        "encoder_cache": GiB // 4,
        "cudagraph": GiB // 2,
        "kv_cache": 53 * GiB,
        "workspace": 0,
        "peak_activation": GiB + GiB // 4,
    }
    return RunRecord(
        run_id="big-1",
        status="ok",
        started_at="2026-01-02T03:04:05.678+00:00",
        total_s=10.0,
        import_s=2.5,
        imports=[ImportRecord(package="torch", s=1.5), ImportRecord(package="transformers", s=0.75)],
        ready_s=9.0,
        spans=[
            Span(name="interpreter", start_s=0.0, wall_s=0.5),
            Span(name="imports", start_s=0.5, wall_s=2.5),
            Span(name="prefetch", start_s=3.0, wall_s=2.0, beside="load_weights"),
            Span(name="record", start_s=9.75, wall_s=0.25),
        ],
        config={"model": {"name": "internvl", "path": None}, "gpu": {"util": 0.9}, "kv": {"bytes": "auto"}},
        versions={"torch": "2.14.1"},
        device={"kind": "cuda", "name": "A GPU", "total_bytes": 80 * GiB},
        stages=[
            stage("load_weights", 3.0, 4.0, spans=[Span(name="read", start_s=3.0, wall_s=3.5)]),
            stage(
                "profile_run",
                7.0,
                1.0,
                metrics={
                    "set_by": "language_model",
                    "peaks_bytes": {"encoder.image": 345 * MiB, "language_model": GiB + GiB // 4},
                },
            ),
            stage("graph_capture", 8.0, 0.0, status="skipped", metrics={"reason": "graphs.mode=none"}),
            stage("allocate_kv", 8.0, 1.0),
            stage("verify", 9.0, 0.75),
        ],
        ledger=LedgerRecord(
            total_bytes=80 * GiB,
            requested_bytes=72 * GiB,
            source="nvml_process",
            accounts=accounts,
            other_processes_bytes=2 * GiB,
            residual_bytes=GiB // 4,
            unused_bytes=GiB,
            held_bytes=70 * GiB,
            peak_held_bytes=71 * GiB,
        ),
        kv_cache=KVCacheRecord(
            num_gpu_blocks=27136,
            block_size=16,
            bytes_per_block=2 * MiB,
            bytes=53 * GiB,
            num_tokens=434176,
            max_concurrency=13.25,
            limited_by="util",
        ),
    )


def tiny_run() -> RunRecord:
    run = ok_run()
    run.run_id = "tiny-2"
    run.device = {"kind": "cpu", "name": "A CPU", "total_bytes": 32 * GiB}
    run.config["model"]["name"] = "tiny_internvl"
    assert run.ledger is not None and run.kv_cache is not None
    run.ledger.total_bytes = 32 * GiB
    run.ledger.accounts |= {"weights": 13 * MiB, "kv_cache": 8 * MiB, "cudagraph": 0, "peak_activation": 40 * MiB}
    run.kv_cache.limited_by = "kv_bytes"
    run.stages[0].wall_s = 0.1
    return run


def failed_run() -> RunRecord:
    run = ok_run()
    run.run_id, run.status, run.ready_s, run.kv_cache = "bad-3", "failed", None, None
    error = ErrorRecord(type="DeviceOutOfMemoryError", message="wanted 2 GiB,\n1 GiB is free")
    run.stages[1] = stage("profile_run", 7.0, 1.0, status="failed", error=error)
    run.stages[2:] = [StageRecord(slot=slot, use=slot, origin="built in") for slot in ("graph_capture", "allocate_kv")]
    run.error = error
    run.total_s = 8.25
    run.spans[-1] = Span(name="record", start_s=8.0, wall_s=0.25)
    assert run.ledger is not None
    run.ledger.accounts |= {"kv_cache": 0, "cudagraph": 0, "peak_activation": 0}
    return run


def unstarted_run() -> RunRecord:
    error = ErrorRecord(type="Interrupted", message="SIGINT")
    return RunRecord(run_id="none-4", status="interrupted", started_at="", total_s=0.25, error=error)


def line_of(text: str, name: str) -> str:
    (line,) = [line for line in text.splitlines() if line.strip().startswith(f"{name} ")]
    return line


def words(text: str, name: str) -> list[str]:
    return line_of(text, name).split()


# The tables


def test_the_table_has_every_interval_with_its_share() -> None:
    text = table(ok_run())
    assert words(text, "imports") == ["imports", "2.500", "25.0", "%"]
    assert line_of(text, "torch").startswith("  torch")
    assert words(text, "load_weights") == ["load_weights", "4.000", "40.0", "%"]
    assert line_of(text, "read").startswith("  read")
    assert line_of(text, "prefetch").endswith("beside load_weights")
    assert line_of(text, "graph_capture").endswith("skipped: graphs.mode=none")
    assert "ready after 9.000 s" in text
    assert "not named" not in text


def test_intervals_are_in_the_order_of_time() -> None:
    names = [line.split()[0] for line in table(ok_run()).splitlines() if re.match(r"\w+ +\d+\.\d{3} ", line)]
    stages = ["load_weights", "profile_run", "graph_capture", "allocate_kv", "verify"]
    assert names == ["interpreter", "imports", "prefetch", *stages, "record", "total"]


def test_imports_without_a_span_are_shown_too() -> None:
    run = ok_run()
    del run.spans[1]
    text = table(run)
    assert words(text, "imports")[1] == "2.500"
    assert "not named" not in text


def test_imports_that_took_no_time_to_speak_of_share_a_row() -> None:
    run = ok_run()
    run.imports += [ImportRecord(package=f"small{number}", s=0.05) for number in range(4)]
    text = table(run)
    assert "small" not in text
    assert words(text, "4 others") == ["4", "others", "0.200", "2.0", "%"]


def test_time_that_no_interval_names_is_shown() -> None:
    run = ok_run()
    run.total_s = 12.0
    assert words(table(run), "not named")[2:] == ["2.000", "16.7", "%"]


def test_the_ledger_has_sizes_shares_and_what_set_the_peak() -> None:
    text = table(ok_run())
    assert words(text, "weights") == ["weights", "15.00", "GiB", "18.8", "%"]
    assert words(text, "context")[1:3] == ["512.00", "MiB"]
    assert line_of(text, "peak_activation").endswith(
        "set by language_model (encoder.image 345.00 MiB, language_model 1.25 GiB)"
    )
    assert words(text, "requested")[1:5] == ["72.00", "GiB", "90.0", "%"]
    assert words(text, "other processes")[2:4] == ["2.00", "GiB"]
    assert "27,136 blocks of 16 tokens = 434,176 tokens" in text


def test_the_rows_above_requested_add_up_to_it() -> None:
    text = table(ok_run())
    rows = text[text.index("\nmemory") : text.index("\nrequested")].splitlines()[2:]
    sizes = {"B": 1, "MiB": MiB, "GiB": GiB}
    total = sum(float(row.split()[1]) * sizes[row.split()[2]] for row in rows)
    assert total == 72 * GiB


def test_numbers_are_aligned_on_the_right() -> None:
    text = table(ok_run())
    for header in ("stage ", "memory "):
        block = text[text.index(f"\n{header}") + 1 :].split("\n\n")[0].splitlines()
        assert len({line.index("%") for line in block[1:]}) == 1


def test_small_models_are_shown_in_units_that_fit() -> None:
    text = table(tiny_run())
    assert words(text, "weights")[1:3] == ["13.00", "MiB"]
    assert words(text, "cudagraph")[1:3] == ["0", "B"]


def test_a_failed_stage_is_visibly_failed() -> None:
    text = table(failed_run())
    assert text.splitlines()[0].startswith("run bad-3: FAILED at stage profile_run")
    assert line_of(text, "profile_run").endswith("FAILED: DeviceOutOfMemoryError: wanted 2 GiB, 1 GiB is free")
    assert words(text, "allocate_kv") == ["allocate_kv", "-", "-", "not", "run"]
    assert words(text, "peak_activation") == ["peak_activation", "-", "-"]
    assert "never ready" in text
    assert text.endswith("failed at stage profile_run: DeviceOutOfMemoryError: wanted 2 GiB,\n1 GiB is free")
    names = [line.partition(" ")[0] for line in text.splitlines()]
    assert (
        names.index("profile_run") < names.index("graph_capture") < names.index("allocate_kv") < names.index("record")
    )


def test_an_unexpected_error_is_shown_with_its_traceback() -> None:
    run = failed_run()
    assert run.error is not None
    run.error.traceback = "Traceback (most recent call last):\n  File x\nZeroDivisionError\n"
    assert table(run).endswith("File x\nZeroDivisionError")


def test_a_run_that_ended_before_its_first_stage() -> None:
    text = table(unstarted_run())
    assert text.startswith("run none-4: INTERRUPTED before the first stage")
    assert "memory: not measured" in text


def test_messages_are_shown() -> None:
    run = ok_run()
    run.messages = ["a neighbour left"]
    assert "a neighbour left" in table(run).splitlines()


# The closing line


def test_the_closing_line_of_a_start() -> None:
    assert closing_line(ok_run()) == (
        "status ok, total 80.00 GiB, util 0.9, requested 72.00 GiB, weights 15.00 GiB, non-torch 0.7500 GiB, "
        "activation peak 1.25 GiB, graphs 0.5000 GiB, KV 53.00 GiB, 27136 blocks of 16, 434176 tokens, "
        "limited by gpu.util, ready in 9.00 s, total time 10.00 s"
    )


def test_the_closing_line_keeps_small_sizes() -> None:
    line = closing_line(tiny_run())
    assert "weights 0.0127 GiB, " in line and "graphs 0.0000 GiB, KV 0.0078 GiB, " in line


def test_the_closing_line_says_that_a_neighbour_took_room() -> None:
    run = ok_run()
    assert run.kv_cache is not None
    run.kv_cache.limited_by = "free"
    assert ", limited by free memory beside 2.00 GiB of other processes, " in closing_line(run)


def test_the_closing_line_of_a_failure_says_where_and_why() -> None:
    assert closing_line(failed_run()) == (
        "status failed, stopped at stage profile_run, total 80.00 GiB, util 0.9, requested 72.00 GiB, "
        "weights 15.00 GiB, non-torch 0.7500 GiB, activation peak -, graphs -, KV -, - blocks, - tokens, never ready, "
        "total time 8.25 s, because DeviceOutOfMemoryError: wanted 2 GiB, 1 GiB is free"
    )


def test_the_closing_line_of_a_failure_after_the_start_was_ready() -> None:
    run = ok_run()
    run.status = "failed"
    run.stages[-1].status = "failed"
    run.error = ErrorRecord(type="VerificationError", message="1 of 4 requests was lost")
    line = closing_line(run)
    assert line.startswith("status failed, stopped at stage verify, ")
    assert ", 27136 blocks of 16, 434176 tokens, " in line
    assert line.endswith("ready in 9.00 s, total time 10.00 s, because VerificationError: 1 of 4 requests was lost")


def test_the_closing_line_of_an_interruption_before_anything() -> None:
    line = closing_line(unstarted_run())
    assert line.startswith("status interrupted, stopped before the first stage, total -, util -, requested -, ")
    assert line.endswith("because Interrupted: SIGINT")
    assert "\n" not in line


def test_an_interruption_between_stages_names_the_last_one() -> None:
    run = unstarted_run()
    run.stages = [stage("load_weights", 0.0, 0.1), StageRecord(slot="verify", use="verify", origin="built in")]
    assert ", stopped after stage load_weights, " in closing_line(run)


# Several runs


def test_a_comparison_has_what_differs_and_what_came_of_it() -> None:
    text = compare([ok_run(), tiny_run()])
    assert words(text, "model.name") == ["model.name", "internvl", "tiny_internvl"]
    assert words(text, "load_weights") == ["load_weights", "4.000", "0.100", "-3.900", "-97.5", "%"]
    assert words(text, "weights")[1:7] == ["15.00", "GiB", "13.00", "MiB", "-14.99", "GiB"]
    assert words(text, "blocks") == ["blocks", "27,136", "27,136"]
    assert "gpu.util" not in text
    assert differing([ok_run(), tiny_run()]) == ["model.name", "device.kind", "device.name", "device.total_bytes"]


def test_a_comparison_with_a_run_that_failed() -> None:
    text = compare([ok_run(), failed_run(), unstarted_run()])
    assert "FAILED at stage profile_run" in line_of(text, "status")
    assert words(text, "allocate_kv") == ["allocate_kv", "1.000", "-", "-"]
    assert words(text, "kv_cache") == ["kv_cache", "53.00", "GiB", "-", "-"]
    assert words(text, "tokens") == ["tokens", "434,176", "-", "-"]


def test_where_the_records_lie_is_no_difference() -> None:
    first, second = ok_run(), ok_run()
    first.config["run"], second.config["run"] = {"dir": "a", "seed": 0}, {"dir": "b", "seed": 1}
    assert differing([first, second]) == ["run.seed"]


def test_more_runs_than_fit_abreast_follow_below() -> None:
    runs = [ok_run().model_copy(update={"run_id": f"run-{number}"}) for number in range(6)]
    text = compare(runs)
    assert text.count("load_weights") == 2
    assert max(map(len, text.splitlines())) <= 120


# HTML


class Parsed(HTMLParser):
    """Fails on a tag that is not closed where it should be; gathers what the tests ask for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[dict[str, str | None]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append(dict(attrs))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def widths(text: str) -> list[list[float]]:
    bars = re.findall(r'<div class="bar">(.*?)</div>', text)
    return [[float(width) for width in re.findall(r"width:([\d.]+)%", bar)] for bar in bars]


def test_the_page_is_whole_and_needs_nothing_else() -> None:
    text = page([ok_run(), failed_run(), unstarted_run()])
    names = {name for attributes in Parsed(text).attributes for name in attributes}
    assert names.isdisjoint({"src", "href", "onload"}) and "<script" not in text and "url(" not in text
    assert html.escape(closing_line(ok_run())) in text
    assert "FAILED at stage profile_run" in text


def test_the_bars_are_to_scale() -> None:
    time, memory = widths(page([ok_run()]))
    assert time == [5.0, 25.0, 40.0, 10.0, 10.0, 7.5, 2.5]
    assert memory[0] == 18.75
    assert sum(memory) == pytest.approx(100 * 74 / 80, abs=0.01)
    for bar in widths(page([failed_run(), tiny_run()])):
        assert sum(bar) <= 100.1


def test_what_comes_from_outside_is_escaped() -> None:
    run = failed_run()
    run.run_id = "<b>&"
    run.config["model"]["name"] = '"><script>alert(1)</script>'
    assert run.error is not None
    run.error.message = "<img src=x>"
    run.stages[0].slot = "<i>load</i>"
    run.messages = ["<u>note</u>"]
    text = page([run, ok_run()])
    Parsed(text)
    for planted in ("<script", "<img", "<i>", "<u>", "<b>"):
        assert planted not in text


# The command


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name, run in (("10", tiny_run()), ("2", ok_run()), ("1", failed_run())):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        write_record(run, folder)
    return tmp_path / "runs"


def test_one_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(runs / "2")]) == 0
    assert capsys.readouterr().out == f"{table(ok_run())}\n\n{closing_line(ok_run())}\n"


def test_a_folder_of_runs_is_read_in_numeric_order(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(runs)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["bad-3", "big-1", "tiny-2"]
    assert f"tiny-2: {closing_line(tiny_run())}" in out.splitlines()


def test_json_of_one_and_of_several(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(runs / "2/run.json"), "--json"]) == 0
    assert RunRecord.model_validate(json.loads(capsys.readouterr().out)) == ok_run()
    assert main([str(runs / "2"), str(runs / "10"), "--json"]) == 0
    assert [value["run_id"] for value in json.loads(capsys.readouterr().out)] == ["big-1", "tiny-2"]


def test_the_page_is_written(runs: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    assert main([str(runs / "2"), "--html", str(target)]) == 0
    assert target.read_text(encoding="utf-8") == page([ok_run()])


def error_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err


def test_a_run_that_is_not_there(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there are: 1, 10, 2" in error_of([str(runs / "seven")], capsys)
    (tmp_path / "empty").mkdir()
    assert "the folder has no run.json" in error_of([str(tmp_path / "empty")], capsys)
    assert "there is no such run" in error_of([str(tmp_path / "a/b/c")], capsys)


def test_a_near_miss_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "2026-01-02_03-04-05").mkdir()
    write_record(ok_run(), tmp_path / "2026-01-02_03-04-05")
    assert "did you mean 2026-01-02_03-04-05?" in error_of([str(tmp_path / "2026-01-02_03-04-50")], capsys)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not the record of a run"),
        ('{"schema_version": 1, "run_id": 3, "started_at": ""}', "run_id"),
        ('{"schema_version": 2}', "schema version 2"),
        ("\x00\xff", "not the record of a run"),
    ],
)
def test_a_broken_record(runs: Path, capsys: pytest.CaptureFixture[str], text: str, said: str) -> None:
    (runs / "2/run.json").write_text(text, encoding="latin-1")
    assert said in error_of([str(runs / "2")], capsys)


def test_one_broken_record_in_a_folder_does_not_hide_the_others(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "2/run.json").write_text("{")
    assert main([str(runs), "--csv"]) == 0
    output, errors = capsys.readouterr()
    assert [line.partition(",")[0] for line in output.splitlines()] == ["run_id", "bad-3", "tiny-2"]
    assert errors.startswith(f"warning: left out: {runs / '2'}: not the record of a run") and errors.count("\n") == 1
    for each in runs.iterdir():
        (each / "run.json").write_text("{")
    assert "not the record of a run" in error_of([str(runs)], capsys)


def test_a_page_that_cannot_be_written(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot be written" in error_of([str(runs / "2"), "--html", str(runs / "no/such/folder.html")], capsys)


def test_the_command_imports_no_torch(runs: Path) -> None:
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['report', {str(runs / '2')!r}]\n"
        "try:\n    runpy.run_module('orchestrator.report', run_name='__main__')\n"
        "except SystemExit as stop:\n    sys.exit(stop.code or ('torch' in sys.modules and 'torch was imported'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(closing_line(ok_run()) + "\n")


def test_a_reader_that_stops_early_is_no_error(runs: Path) -> None:
    command = [sys.executable, "-m", "orchestrator.report", str(runs / "2")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
