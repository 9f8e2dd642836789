"""What goes into a wheel, where packages are listed by name, so that none must be forgotten; and into .venv."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_every_package_and_the_configuration_are_listed() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = [*(ROOT / "orchestrator").rglob("*.py"), *(ROOT / "hydra_plugins").rglob("*.py")]
    folders = {path.parent.relative_to(ROOT) for path in found}
    assert set(tool["packages"]) == {*(".".join(folder.parts) for folder in folders), "orchestrator.conf"}
    assert tool["package-dir"]["orchestrator.conf"] == "conf"
    assert tool["package-data"]["orchestrator.conf"] == ["**/*.yaml"]
    assert (ROOT / "orchestrator" / tool["package-data"]["orchestrator"][0]).is_file()
    assert tool["package-data"]["orchestrator.engine.models"] == ["configs/*.json"]


def test_the_environment_has_what_reads_a_process_own_bytes_on_a_gpu() -> None:
    """Without it a start in what `make start` made does not count its CUDA context."""
    extras = re.search(r"--editable '\.\[([\w,]+)\]'", (ROOT / "Makefile").read_text())
    assert extras is not None
    installed = set(extras[1].split(","))
    assert "cuda" in installed
    assert installed <= set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
