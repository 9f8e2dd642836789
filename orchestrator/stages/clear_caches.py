"""Empty what the start filled and serving does not need, and check that it is empty."""

from __future__ import annotations

import gc
import weakref

from orchestrator.artifacts import DUMMY, ENGINE
from orchestrator.errors import StillHeldError
from orchestrator.stage import Context, Stage, StageConfig
from orchestrator.units import format_size


class ClearCachesConfig(StageConfig):
    """No options of its own."""


class ClearCaches(Stage[ClearCachesConfig]):
    Config = ClearCachesConfig
    requires = (ENGINE,)

    def run(self, ctx: Context) -> str:
        engine = ctx.state.get(ENGINE)
        dummy = weakref.ref(ctx.state.get(DUMMY)) if ctx.state.has(DUMMY) else None
        before = ctx.device.snapshot().reserved_bytes
        engine.clear_caches()
        ctx.state.release(DUMMY)
        if dummy is not None and dummy() is not None:
            # Only now: a full collection walks over all that torch imported, 0.2 s.
            gc.collect()
        held = {name: count for name, count in engine.held().items() if count}
        if dummy is not None and dummy() is not None:
            held["dummy data"] = 1
        if held:
            raise StillHeldError(held)
        ctx.device.empty_cache()
        given_back = max(0, before - ctx.device.snapshot().reserved_bytes)
        ctx.metrics.update(given_back_bytes=given_back, checked=[*engine.held(), "dummy data"])
        return f"gave back {format_size(given_back)}"
