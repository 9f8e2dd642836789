"""Kernels of the steps to come, loaded beside the weights."""

from __future__ import annotations

from orchestrator.engine.base import Engine
from orchestrator.engine.warming import KnownStep, LoadsKernels
from orchestrator.stage import Context
from orchestrator.stages.graph_capture import capture_sizes
from orchestrator.startup_plan import STARTUP_PLAN


def load_kernels(known: tuple[Context, Engine]) -> str | None:
    """What went wrong, if anything did: later steps then load what they need themselves."""
    ctx, engine = known
    if not isinstance(engine, LoadsKernels):
        return None
    scheduler, graphs = ctx.config.scheduler, ctx.config.graphs
    sizes = [scheduler.max_num_seqs] if graphs.mode == "none" else capture_sizes(graphs.sizes, scheduler.max_num_seqs)
    try:
        return engine.load_kernels(sizes, lambda: _known_step(ctx))
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]


def _known_step(ctx: Context) -> KnownStep | None:
    """By the start-up plan, if it has been found by now: another thread looks for it."""
    learned = ctx.state.get(STARTUP_PLAN).learned if ctx.state.has(STARTUP_PLAN) else None
    if learned is None:
        return None
    measured = learned.facts.measured
    peaks = [part.above for name, part in measured.parts.items() if name.startswith("encoder.")]
    return KnownStep(learned.step, measured.micro_batch, measured.piece_tokens, max(peaks)) if peaks else None
