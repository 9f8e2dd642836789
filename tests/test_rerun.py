"""A recorded run is repeated from its record alone, and what differs is said before and after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.__main__ import main as start
from orchestrator.records import LedgerRecord, RunRecord, read_record, write_record
from orchestrator.registry import Registry
from orchestrator.rerun.__main__ import main
from orchestrator.rerun.circumstances import Difference, differences, recorded
from orchestrator.rerun.configuration import repeatable
from orchestrator.rerun.results import compared
from orchestrator.units import GiB, MiB
from tests.starts import FEW_TOKENS, SMALL


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that measured, and learned for later ones."""
    folder = tmp_path_factory.mktemp("repeated") / "one"
    assert start([*SMALL, FEW_TOKENS, "startup_plan=refresh", f"run.dir={folder}"]) == 0
    return folder


def changed(run: Path, folder: Path, **values: Any) -> Path:
    folder.mkdir()
    write_record(read_record(run).model_copy(update=values), folder)
    return folder


def test_the_same_seed_gives_the_same_blocks_bytes_and_tokens(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_PROC_BIND", "false")
    record = read_record(run)
    before = changed(run, tmp_path / "before", versions={**record.versions, "transformers": "5.0.0"})
    assert main([str(before), "--dir", str(tmp_path / "again"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [(each["name"], each["then"]) for each in said["before"]] == [
        ("version.transformers", "5.0.0"),
        ("environment.OMP_PROC_BIND", "-"),
    ]
    assert said["late"] == [] and said["results"]["different"] == [] and said["results"]["unknown"] == []
    assert set(said["results"]["same"]) == {"status", "blocks", "dummy image", "tokens of verify", "accounts"}
    assert set(said["seconds"]) >= {"load_weights", "verify", "ready", "total"}
    again = read_record(tmp_path / "again")
    assert again.config["scheduler"] == record.config["scheduler"] and again.overrides == record.overrides


def test_results_that_differ_are_named(run: Path) -> None:
    then, now = read_record(run), read_record(run)
    assert then.kv_cache is not None and now.kv_cache is not None
    now.kv_cache.num_gpu_blocks -= 1
    by_slot = {stage.slot: stage.metrics for stage in now.stages}
    by_slot["verify"]["tokens_sha256"] = "0" * 64
    del by_slot["dummy_data"]["modalities"]["image"]["sha256"]
    found = compared(then, now)
    assert [each.name for each in found.different] == ["blocks", "tokens of verify"]
    assert found.unknown == ("dummy image",)


@pytest.mark.parametrize(("more", "differs"), [(15 * MiB, False), (17 * MiB, True)])
def test_accounts_differ_beyond_what_readings_vary_by(more: int, differs: bool) -> None:
    def with_weights(size: int) -> RunRecord:
        ledger = LedgerRecord(
            total_bytes=GiB,
            requested_bytes=GiB,
            source="nvml_process",
            accounts={"weights": size},
            other_processes_bytes=0,
            residual_bytes=0,
            peak_held_bytes=0,
        )
        return RunRecord(run_id="a", started_at="", ledger=ledger)

    found = compared(with_weights(GiB), with_weights(GiB + more)).different
    assert [each.name for each in found] == (["account weights"] if differs else [])


def test_what_an_older_record_does_not_say_is_no_difference(run: Path) -> None:
    old, new = read_record(run), read_record(run)
    old.provenance = None
    del old.stages[0].metrics["model_files"]
    assert differences(recorded(old), recorded(new)) == []
    assert new.provenance is not None
    new.provenance.environment["OMP_DYNAMIC"] = "1"
    newer = recorded(read_record(run))
    assert differences(newer, recorded(new)) == [Difference("environment.OMP_DYNAMIC", "-", "1")]


def test_a_plugin_or_a_library_that_is_gone_is_a_difference(run: Path) -> None:
    old, new = read_record(run), read_record(run)
    assert old.provenance is not None
    old.provenance.plugins["far-away"] = "1.2"
    old.versions |= {"triton": "3.0", "nvidia-ml-py": None}
    new.versions |= {"triton": None, "nvidia-ml-py": "13.0", "brand-new": "1.0"}
    assert differences(recorded(old), recorded(new)) == [
        Difference("version.triton", "3.0", "-"),
        Difference("version.nvidia-ml-py", "-", "13.0"),
        Difference("plugin.far-away", "1.2", "-"),
    ]


def test_a_run_that_measured_measures_again_and_one_that_took_over_does_too(run: Path) -> None:
    record, registry = read_record(run), Registry.discover()
    record.config["startup_plan"] = "use"
    again = repeatable(record, registry)
    assert again.config.startup_plan == "off" and "startup_plan=off" in again.notes[0]
    record.stages[0].metrics["startup_plan"] = {"status": "hit"}
    assert repeatable(record, registry).config.startup_plan == "use"


def test_a_key_that_is_new_has_its_default(run: Path) -> None:
    record = read_record(run)
    del record.config["encoder"]["micro_batch"]
    again = repeatable(record, Registry.discover())
    assert again.config.encoder.micro_batch == "auto"
    assert again.notes[0] == "encoder.micro_batch did not exist then; it is auto"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            "gpu.utl",
            0.5,
            "version cannot run its configuration: gpu.utl: there is no such key; did you mean util?",
        ),
        ("model.path", "https://***@host/model", "model.path had a secret, which no record has"),
        ("stages.verify.old_option", 1, "cannot run its configuration: stages.verify.old_option: there is no such key"),
    ],
)
def test_what_cannot_be_repeated_is_refused(
    run: Path, tmp_path: Path, path: str, value: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record = read_record(run)
    node, (*parents, name) = record.config, path.split(".")
    for parent in parents:
        node = node[parent]
    node[name] = value
    assert main([str(changed(run, tmp_path / "bad", config=record.config)), "--dir", str(tmp_path / "new")]) == 2
    out, errors = capsys.readouterr()
    assert (out, len(errors.splitlines())) == ("", 1) and message in errors
    assert not (tmp_path / "new").exists()


def test_a_path_without_a_record_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none")]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 2
    assert "cannot be read: the folder has no run.json" in capsys.readouterr().err
    write_record(RunRecord(run_id="empty", started_at=""), tmp_path)
    assert main([str(tmp_path)]) == 2
    assert "has no configuration" in capsys.readouterr().err
