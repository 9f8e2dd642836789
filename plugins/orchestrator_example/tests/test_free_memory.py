"""The stage on a device whose memory is a number, and its place in a composed pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest
from orchestrator_example.free_memory import FreeMemory, FreeMemoryConfig

from orchestrator import StageError
from orchestrator.cache import Cache
from orchestrator.clock import Clock
from orchestrator.compose import compose
from orchestrator.device.fake import FakeDevice
from orchestrator.events import SilentEvents
from orchestrator.memory.ledger import Ledger
from orchestrator.registry import Registry
from orchestrator.stage import Context
from orchestrator.state import State

APPENDED = "+stage@stages.free_memory=free_memory"


def context(tmp_path: Path, device: FakeDevice) -> Context:
    return Context(
        config=compose([APPENDED]).config,
        device=device,
        cache=Cache(tmp_path, max_bytes=1, enabled=False, warn=print),
        state=State(),
        ledger=Ledger(device.total_bytes, 0.9, "nvml_process"),
        events=SilentEvents(),
        clock=Clock.from_now(),
        run_dir=tmp_path,
        resolver=Registry.discover().resolve,
    )


def test_reports_what_is_free(tmp_path: Path) -> None:
    ctx = context(tmp_path, FakeDevice(3 * 2**30, others_bytes=2**30))
    assert FreeMemory(FreeMemoryConfig(use="free_memory")).run(ctx) == "2.00 GiB are free"
    assert ctx.metrics == {"free_bytes": 2 * 2**30}


def test_fails_with_both_numbers_if_too_little_is_free(tmp_path: Path) -> None:
    ctx = context(tmp_path, FakeDevice(100, others_bytes=60))
    with pytest.raises(StageError, match=r"40 bytes are free, fewer than at_least_bytes=50"):
        FreeMemory(FreeMemoryConfig(use="free_memory", at_least_bytes=50)).run(ctx)


def test_its_yaml_appends_it_with_the_defaults_of_its_config() -> None:
    stages = compose([APPENDED]).config.stages
    assert list(stages)[-1] == "free_memory"
    assert FreeMemoryConfig(**stages["free_memory"]) == FreeMemoryConfig(use="free_memory")
