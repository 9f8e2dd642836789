"""Imports: timed by package and by what is right below it, and without the garbage collector meanwhile."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.import_timer import ImportTimer
from orchestrator.importing import import_all, link_torch, without_collections
from tests.starts import ROOT

PAUSE_S = 0.03


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`outer_timed` imports its own `deep.slow`, which sleeps and imports `inner_timed`, which sleeps too."""
    sleep = f"import time\ntime.sleep({PAUSE_S})\n"
    files = {
        "outer_timed/__init__.py": "import outer_timed.deep.slow\n",
        "outer_timed/deep/__init__.py": "",
        "outer_timed/deep/slow.py": f"{sleep}import inner_timed\n",
        "inner_timed.py": sleep + sleep,
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("outer_timed", "outer_timed.deep", "outer_timed.deep.slow", "inner_timed"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_time_goes_to_the_package_that_took_it(packages: None) -> None:
    with ImportTimer() as timer:
        importlib.import_module("outer_timed")
    found = {each.package: each for each in timer.packages()}
    assert set(found) == {"outer_timed", "inner_timed"}
    assert set(found["outer_timed"].parts) == {"outer_timed", "outer_timed.deep"}
    assert found["outer_timed"].parts["outer_timed.deep"] >= PAUSE_S
    assert found["inner_timed"].s >= 2 * PAUSE_S
    assert found["outer_timed"].s == pytest.approx(sum(found["outer_timed"].parts.values()))


def test_the_slowest_come_first(packages: None) -> None:
    with ImportTimer() as timer:
        importlib.import_module("outer_timed")
    seconds = [each.s for each in timer.packages()]
    assert seconds == sorted(seconds, reverse=True)


def test_collections_come_back_also_after_an_error() -> None:
    assert gc.isenabled()
    with pytest.raises(ModuleNotFoundError), without_collections(keeps_all=False):
        assert not gc.isenabled()
        import_all(["json", "there_is_no_such_module"])
    assert gc.isenabled()


def test_a_program_that_turned_the_collector_off_keeps_it_so() -> None:
    gc.disable()
    try:
        with without_collections(keeps_all=False):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("keeps_all", "module", "frozen"), [(True, "colorsys", True), (True, "json", False), (False, "colorsys", False)]
)
def test_what_stays_is_left_out_of_later_collections(keeps_all: bool, module: str, frozen: bool) -> None:
    """In a process of its own: it cannot be undone for single objects."""
    program = (
        "import gc, json\n"
        "from orchestrator.importing import import_all, without_collections\n"
        "before = gc.get_freeze_count()\n"
        f"with without_collections(keeps_all={keeps_all}):\n"
        f"    import_all(['{module}'])\n"
        "print(gc.get_freeze_count() > before)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"{frozen}\n"


def test_torch_is_linked_while_what_needs_none_is_imported() -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from orchestrator.beside import Beside\n"
        "from orchestrator.clock import Clock\n"
        "from orchestrator.early import import_torch\n"
        "from orchestrator.importing import link_torch\n"
        "link_torch()\n"
        "mapped = 'libtorch_cpu.so' in Path('/proc/self/maps').read_text()\n"
        "print(mapped, 'torch' in sys.modules)\n"
        "beside = Beside(Clock.from_now())\n"
        "import_torch(beside, with_transformers=True)\n"
        "import_torch(beside, with_transformers=True)\n"
        "print(sys.modules['torch'].ones(2).sum().item(), [span.name for span in beside.spans()])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n2.0 ['link torch']\n"


def test_without_torch_there_is_nothing_to_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    link_torch()
