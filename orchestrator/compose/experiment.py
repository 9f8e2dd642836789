"""Ready experiments: a file of `conf/experiment` has settings, and in `hydra.sweeper.params` what is swept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.compose import read_all
from orchestrator.compose.folders import ConfigFolders
from orchestrator.compose.tree import compose_tree

GROUP = "experiment"


def with_parameters(overrides: Sequence[str], folders: ConfigFolders) -> list[str]:
    """The overrides of a sweep, with what its experiment sweeps among them, as if it had been typed.

    So the points are checked before the first one runs, and a setting that was typed takes the place of the
    experiment's; Hydra's sweeper itself would run both. Overrides that cannot be composed stay as they are: what is
    wrong with them is said elsewhere.
    """
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    given = read_all(overrides, multirun=True)
    if all(each.key != GROUP or each.sweep for each in given):
        return list(overrides)
    try:
        tree = compose_tree([each for each in given if not each.sweep], folders, with_hydra=True)
        params: Any = OmegaConf.to_container(tree.hydra.sweeper.params or OmegaConf.create({}), resolve=True)
    except (HydraException, OmegaConfBaseException):
        return list(overrides)
    typed = {each.key for each in given}
    swept = [f"{name}={value}" for name, value in params.items() if name not in typed]
    return [*overrides, *swept, "hydra.sweeper.params=null"]
