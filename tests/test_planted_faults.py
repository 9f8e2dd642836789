"""Faults planted into the real engine, each of which `verify` must catch."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator import start
from orchestrator.starting import StartError
from tests.starts import FEW_TOKENS, SMALL, statuses

NEEDED = ("kv.bytes=need", "~stage@stages.graph_capture", "~stage@stages.clear_caches")


def caught_with(faulty: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> str:
    """What `verify` said of a start with an engine or an attention backend of `tests.planted`."""
    monkeypatch.chdir(folder)
    with pytest.raises(StartError) as caught:
        start([*SMALL, FEW_TOKENS, *NEEDED, faulty, *more])
    record = caught.value.record
    assert statuses(record)[-1] == "failed"
    assert set(statuses(record)[:-1]) == {"ok"}
    assert record.error is not None
    assert record.error.type == "VerificationError"
    return record.error.message


def test_a_garbage_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = caught_with("engine.attention=tests.planted:GarbageBlock", tmp_path, monkeypatch)
    assert "log-probability" in message and "the oracle's" in message


def test_a_slot_off_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = caught_with("engine.attention=tests.planted:SlotOffByOne", tmp_path, monkeypatch)
    assert "log-probability" in message and "the oracle's" in message


def test_a_lost_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "request verify-3 was lost: 3 of 4 came back" in caught_with(
        "engine.name=tests.planted:LostRequest", tmp_path, monkeypatch
    )


def test_memory_allocated_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a profile there is no peak to compare with, and what is kept is all that can be wrong.
    unprofiled = ("~stage@stages.profile_run", "mm.limit_per_prompt.image=0")
    message = caught_with("engine.name=tests.planted:LateMemory", tmp_path, monkeypatch, *unprofiled)
    assert message.endswith("memory was allocated late")


def test_a_peak_above_what_was_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "above what was held" in caught_with("engine.name=tests.planted:GreedyPeak", tmp_path, monkeypatch)
