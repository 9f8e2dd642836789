"""Kernels of the steps to come, loaded beside the weights."""

from __future__ import annotations

from orchestrator.engine.base import Engine
from orchestrator.engine.warming import LoadsKernels
from orchestrator.stage import Context


def load_kernels(known: tuple[Context, Engine]) -> str | None:
    """What went wrong, if anything did: later steps then load what they need themselves."""
    _, engine = known
    if not isinstance(engine, LoadsKernels):
        return None
    try:
        return engine.load_kernels()
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
