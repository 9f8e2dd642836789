"""What a step of the language model will take at least, known before a weight is read: a plan of that step alone."""

from __future__ import annotations

from orchestrator.config import Config, GpuSpec
from orchestrator.device.plan import PlanDevice
from orchestrator.engine import build
from orchestrator.engine.dummy_spans import dummy_spans
from orchestrator.engine.encoder_cache import EncoderCache
from orchestrator.engine.kv_cache import KVCache
from orchestrator.engine.loading import Prepared
from orchestrator.engine.planning.attention import BACKENDS
from orchestrator.engine.planning.repeats import Repeats
from orchestrator.engine.planning.shapes import Shapes
from orchestrator.engine.planning.tape import Tape
from orchestrator.engine.runner import ModelRunner
from orchestrator.errors import StageError
from orchestrator.memory.snapshot import peak_of
from orchestrator.units import TiB

SHARE = 0.95
"""What of a planned peak is counted on: plans of measured starts were within 3 per cent of what was reserved."""
_CARD = GpuSpec(
    name="any card",
    capability="9.0",
    total_bytes=64 * TiB,
    driver_bytes=0,
    context_bytes=0,
    library_bytes=0,
    workspace_bytes=0,
    graph_bytes=0,
    graph_node_bytes=0,
    attention="triton",
    allocator="expandable",
    measured=False,
    bound_fraction=0.0,
)
"""Peaks do not depend on how much memory a card has."""


def least_peak(prepared: Prepared, config: Config) -> int:
    """Bytes that a step of `max_num_batched_tokens` tokens takes above what stays, whatever encoders take; 0 where that
    cannot be planned. Takes tenths of a second: layers that are alike are run once."""
    backend = BACKENDS.get(prepared.backend.name)
    if backend is None:
        return 0
    device = PlanDevice(_CARD)
    tape = Tape(device)
    shapes = Shapes(tape)
    # A model of its own, so that nothing of this stays with the one that is served.
    model = build.on_meta(prepared.what)
    repeats = Repeats(tape, shapes)
    repeats.stand_in(model)
    scheduler = config.scheduler
    new = min(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * prepared.max_model_len)
    spans = dummy_spans(new, max(1, prepared.max_model_len - new), prepared.max_model_len, scheduler.max_num_seqs)
    try:
        with repeats.one_step(), shapes.running():
            shapes.hold(model)
            runner = ModelRunner(model, backend(), device.torch_device, prepared.traits, 1)
            cache = KVCache.padding_only(prepared.kv_spec, config.kv.block_size, device.torch_device)
            encoder = EncoderCache(0, runner.encoder_width, prepared.what.dtype, device.torch_device)
            with peak_of(device) as peak:
                runner.dummy_step(spans, cache, encoder)
    except StageError:
        return 0
    return int(SHARE * peak.charged_bytes)
