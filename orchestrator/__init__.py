"""A declarative start-up orchestrator for multimodal inference engines.

What is importable from here is what plugins and other programs may use. Names are looked up when they are first used,
so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.artifacts import (
        DUMMY,
        ENGINE,
        GRAPHS,
        KV_CACHE,
        MODEL_KNOWN,
        PROFILE,
        VERIFIED,
        Graphs,
        KVAllocation,
        Profile,
    )
    from orchestrator.beside import Beside
    from orchestrator.config import Config
    from orchestrator.engine.base import Engine, Event, Media, Output, Request
    from orchestrator.errors import ConfigError, StageError, UserError
    from orchestrator.measuring import MemoryReport, measure_memory
    from orchestrator.modality.base import DummyBatch, ItemSpec, MediaInputs, ModalityProfiler
    from orchestrator.stage import Context, Skipped, Stage, StageConfig
    from orchestrator.starting import start
    from orchestrator.state import Key, State
    from orchestrator.tracking import FinishedRun, Tracker

__version__ = "0.1.0"

__all__ = [
    "DUMMY",
    "ENGINE",
    "GRAPHS",
    "KV_CACHE",
    "MODEL_KNOWN",
    "PROFILE",
    "VERIFIED",
    "Beside",
    "Config",
    "ConfigError",
    "Context",
    "DummyBatch",
    "Engine",
    "Event",
    "FinishedRun",
    "Graphs",
    "ItemSpec",
    "KVAllocation",
    "Key",
    "Media",
    "MediaInputs",
    "MemoryReport",
    "ModalityProfiler",
    "Output",
    "Profile",
    "Request",
    "Skipped",
    "Stage",
    "StageConfig",
    "StageError",
    "State",
    "Tracker",
    "UserError",
    "measure_memory",
    "start",
]

_HOMES = {
    "orchestrator.artifacts": (
        *("DUMMY", "ENGINE", "GRAPHS", "KV_CACHE", "MODEL_KNOWN", "PROFILE", "VERIFIED"),
        *("Graphs", "KVAllocation", "Profile"),
    ),
    "orchestrator.beside": ("Beside",),
    "orchestrator.config": ("Config",),
    "orchestrator.engine.base": ("Engine", "Event", "Media", "Output", "Request"),
    "orchestrator.errors": ("ConfigError", "StageError", "UserError"),
    "orchestrator.measuring": ("MemoryReport", "measure_memory"),
    "orchestrator.modality.base": ("DummyBatch", "ItemSpec", "MediaInputs", "ModalityProfiler"),
    "orchestrator.stage": ("Context", "Skipped", "Stage", "StageConfig"),
    "orchestrator.starting": ("start",),
    "orchestrator.state": ("Key", "State"),
    "orchestrator.tracking": ("FinishedRun", "Tracker"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(module), name)
            # Kept, because importing a submodule binds its own name here, and one of them may be called as what it has.
            globals()[name] = value
            return value
    raise AttributeError(f"module 'orchestrator' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
