"""Capture decode graphs, largest batch first, and charge what they took."""

from __future__ import annotations

from orchestrator.artifacts import ENGINE, GRAPHS, Graphs
from orchestrator.engine.base import Engine
from orchestrator.memory.budget import cudagraph_bytes
from orchestrator.stage import Context, Skipped, Stage, StageConfig
from orchestrator.stages.room import refuse_before_capture
from orchestrator.units import format_size


class GraphCaptureConfig(StageConfig):
    """No options of its own: mode and sizes are `graphs`."""


class GraphCapture(Stage[GraphCaptureConfig]):
    Config = GraphCaptureConfig
    requires = (ENGINE,)
    provides = (GRAPHS,)
    memory_knobs = ("fewer graphs.sizes", "graphs.mode=none", "a smaller scheduler.max_num_seqs")

    def run(self, ctx: Context) -> str:
        if ctx.config.graphs.mode == "none":
            raise Skipped("graphs.mode=none: every step runs eagerly")
        if not ctx.device.supports_graphs:
            raise Skipped(f"the device {ctx.device.torch_device} has no graphs: every step runs eagerly")
        sizes = capture_sizes(ctx.config.graphs.sizes, ctx.config.scheduler.max_num_seqs)
        engine = ctx.state.get(ENGINE)
        refuse_before_capture(ctx, engine)
        if engine.keeps_graphs:
            # The padding block's page is the KV cache's, not the graphs'.
            engine.kv_bytes(0)
        # What the allocator keeps for reuse would hide what the graphs take.
        ctx.device.empty_cache()
        before = ctx.device.snapshot().ours_bytes
        captured = engine.capture(sizes)
        if not captured:
            raise Skipped("the attention backend cannot be captured: every step runs eagerly")
        ctx.device.empty_cache()
        reading = ctx.device.snapshot()
        taken = cudagraph_bytes([before, reading.ours_bytes])
        if reading.ours_bytes < before:
            ctx.events.warning(f"memory fell by {format_size(before - reading.ours_bytes)} during capture: charged 0")
        ctx.ledger.charge("cudagraph", taken)
        ctx.ledger.read_at_rest(reading)
        _note_mode(ctx, engine)
        ctx.metrics.update(graphs=[vars(graph) for graph in captured], bytes=taken)
        ctx.state.put(GRAPHS, Graphs(captured))
        return f"{len(captured)} graphs, {format_size(taken)}"


def _note_mode(ctx: Context, engine: Engine) -> None:
    ctx.metrics["mode"] = "keep" if engine.keeps_graphs else "estimate"
    if ctx.config.graphs.mode == "keep" and not engine.keeps_graphs:
        ctx.metrics["why_not_kept"] = ctx.device.virtual_memory_refusal
        ctx.events.info(f"graphs cannot be kept: {ctx.device.virtual_memory_refusal}; they are captured twice")


def capture_sizes(sizes: str | list[int], max_num_seqs: int) -> list[int]:
    """Batch sizes to capture, largest first. `auto`: 1, 2, 4, then multiples of 8, up to and with `max_num_seqs`."""
    if isinstance(sizes, list):
        chosen = {min(size, max_num_seqs) for size in sizes}
    else:
        chosen = {size for size in (1, 2, 4, *range(8, max_num_seqs, 8)) if size <= max_num_seqs} | {max_num_seqs}
    return sorted(chosen, reverse=True)
