"""Out of memory with the real engine on a CPU: told in one sentence, everything given back, the next start works."""

from __future__ import annotations

import gc
from pathlib import Path

import psutil
import pytest

from orchestrator import start
from orchestrator.__main__ import main
from orchestrator.starting import StartError
from orchestrator.units import MiB
from tests.starts import FEW_TOKENS, SMALL, only_record, statuses

HUNGRY = "engine.name=tests.planted:Hungry"


def resident() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def test_a_refused_allocation_is_told_and_given_back_and_the_next_start_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with start([*SMALL, FEW_TOKENS]):
        pass
    before = resident()
    with pytest.raises(StartError) as failed:
        start([*SMALL, FEW_TOKENS, HUNGRY])
    record = failed.value.record
    assert record.status == "failed"
    assert statuses(record)[:4] == ["ok", "ok", "failed", "not_run"]
    assert record.error is not None
    assert record.error.type == "DeviceOutOfMemoryError"
    assert record.error.message.startswith("stages.profile_run: out of memory (")
    assert "charged so far: weights 17.85 MiB" in record.error.message
    assert "would help: a smaller scheduler.max_num_batched_tokens" in record.error.message
    # A size of the KV cache was asked for, and no share.
    assert "gpu.util" not in record.error.message
    assert record.ledger is not None
    assert record.ledger.accounts["weights"] > 17 * MiB
    # The planted engine holds 256 MiB in its frame when it fails.
    del failed
    assert resident() - before < 128 * MiB
    with start([*SMALL, FEW_TOKENS]) as started:
        assert started.record.status == "ok"


def test_the_command_line_exits_with_1_and_leaves_a_whole_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, HUNGRY]) == 1
    assert "stages.profile_run: out of memory" in "".join(capsys.readouterr())
    record = only_record(tmp_path)
    assert record.status == "failed"
    assert len(record.stages) == 7


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("kv.bytes=auto", "gpu.total_bytes=4GiB", "gpu.util=0.004"), "and 0 fit: with weights of 17.85 MiB"),
        (("kv.bytes=auto", "gpu.total_bytes=4GiB", "gpu.util=0.004"), "gpu.util=0.01 or kv.bytes=1048576 could work"),
        (("kv.bytes=512KiB",), "takes 16 blocks, and 8 fit; scheduler.max_model_len=128 or kv.bytes=1048576 could"),
        (("kv.bytes=900TiB",), "15099494400 blocks of the KV cache take 921600.00 GiB"),
        (("kv.bytes=need", "scheduler.max_num_seqs=1000000"), "scheduler.max_num_seqs="),
    ],
)
def test_what_cannot_fit_is_refused_before_weights_are_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: tuple[str, ...],
    named: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, *given]) == 2
    out = "".join(capsys.readouterr())
    assert named in out
    assert "Traceback" not in out
    record = only_record(tmp_path)
    assert record.stages[0].status == "failed"
    assert record.ledger is not None
    assert record.ledger.accounts["weights"] == 0
