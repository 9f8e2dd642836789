"""What every test needs: no hub, a disk cache of its own, and the embedded model as a folder."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from orchestrator.engine.models.tiny_internvl import TinyInternVL
from orchestrator.model_folder import find_folder
from tests.gpu.sources import stale_records
from tests.toy import composed


@pytest.fixture(scope="session", autouse=True)
def no_hub_and_a_cache_of_our_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One cache for all worker processes of a test run: the embedded model is written once."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["ORCHESTRATOR_CACHE"] = str(shared / "orchestrator-cache")


@pytest.fixture(scope="session", autouse=True)
def a_ctrl_c_that_counts() -> None:
    """A shell gives what it runs in the background a Ctrl-C that is ignored, and so do its children."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_folder(no_hub_and_a_cache_of_our_own: None) -> Path:
    """The embedded model's folder."""
    config = composed()
    return find_folder(config.model, make=lambda name: TinyInternVL(), cache_dir=Path(config.cache.dir))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which records of a GPU are older than the code; they cannot be made again here."""
    for name in stale_records():
        terminalreporter.write_line(f"older than the code: tests/gpu/records/{name}.json")
