"""What goes into a wheel: the packages are listed by name, so a new folder must not be forgotten."""

from __future__ import annotations

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
