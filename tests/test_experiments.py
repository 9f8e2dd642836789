"""Every experiment can be swept, as it is and with what is typed in the place of its own."""

from __future__ import annotations

import pytest

from orchestrator.compose import read_all
from orchestrator.compose.experiment import with_parameters
from orchestrator.compose.folders import ConfigFolders
from orchestrator.compose.sweep import prepare
from orchestrator.errors import ConfigError
from orchestrator.registry import Registry
from tests.starts import ROOT

REGISTRY = Registry.discover()
FOLDERS = ConfigFolders.find(REGISTRY)
NAMES = sorted(path.stem for path in (ROOT / "conf/experiment").glob("*.yaml"))


def swept(*overrides: str) -> dict[str, tuple[str, ...]]:
    """What a sweep with these overrides runs over, once every check of it has passed."""
    prepared = prepare(with_parameters(overrides, FOLDERS), REGISTRY, FOLDERS)
    return {each.key: each.sweep for each in read_all(prepared, multirun=True) if each.sweep}


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_composes_and_has_points(name: str) -> None:
    points = swept(f"experiment={name}")
    assert points and all(len(values) > 1 for values in points.values())
    text = (ROOT / f"conf/experiment/{name}.yaml").read_text()
    assert f"-m experiment={name}" in text


def test_the_flagship_is_one_override_away() -> None:
    assert len(swept("experiment=encoder_budget", "model=internvl2_5_8b", "model.load_format=dummy")) == 1


def test_what_is_typed_takes_the_place_of_what_the_experiment_sweeps() -> None:
    given = ("experiment=start_up", "startup_plan=use")
    assert list(swept(*given)) == ["cache.enabled"]
    assert swept("experiment=graphs", "graphs.mode=none,keep", "gpu.util=0.5,0.6") == {
        "graphs.mode": ("none", "keep"),
        "gpu.util": ("0.5", "0.6"),
    }


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("experiment=encoder_budgets", "did you mean encoder_budget?"),
        ("gpu.utl=1", "did you mean gpu.util?"),
    ],
)
def test_a_misspelt_name_is_named(override: str, message: str) -> None:
    given = [override] if override.startswith("experiment") else ["experiment=graphs", override]
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        swept(*given)
