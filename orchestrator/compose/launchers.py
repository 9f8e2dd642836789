"""The launcher over Ray, offered to Hydra where Ray is installed; the others are packages that Hydra finds itself."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any


@dataclass
class RayNode:
    """`hydra.launcher.ray`: what `ray.init` and `ray.remote` are given."""

    init: dict[str, Any] = field(default_factory=lambda: {"address": None})
    remote: dict[str, Any] = field(default_factory=lambda: {"max_retries": 0})


@dataclass
class RayLauncherNode:
    """`hydra/launcher=ray`, with the keys of Hydra's own plugin, whose package asks for an old cloudpickle."""

    _target_: str = "hydra_plugins.orchestrator_ray.RayLauncher"
    ray: RayNode = field(default_factory=RayNode)


def offer_ray() -> None:
    """Make `hydra/launcher=ray` known to Hydra, if Ray is there."""
    if importlib.util.find_spec("ray") is None:
        return
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins

    # Hydra itself does not find it in a checkout that is installed in place.
    from hydra_plugins.orchestrator_ray import RayLauncher

    # Plugins are found first, so that a launcher of the same name does not take this one's place.
    Plugins.instance().register(RayLauncher)
    ConfigStore.instance().store(group="hydra/launcher", name="ray", node=RayLauncherNode, provider="orchestrator")
