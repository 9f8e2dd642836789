"""Whether what is known so far leaves room for one request of the greatest length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from orchestrator.artifacts import PROFILE
from orchestrator.config import Config
from orchestrator.engine.base import Engine, Foresees
from orchestrator.memory.budget import blocks_needed
from orchestrator.memory.fit import Room, refuse_if_no_request_fits
from orchestrator.stage import Context
from orchestrator.startup_plan import STARTUP_PLAN
from orchestrator.units import format_size

_TIGHT = 0.5
"""What is left beside weights and one request, as a share of the ceiling, from which on a step is planned too."""


def refuse_before_loading(ctx: Context, engine: Engine, weights: int) -> None:
    """Refuse, before a weight is read, what cannot fit: whatever the activations turn out to take, and where little is
    left beside the weights, with what a step of the language model takes at least by plan. Where the pipeline allocates
    no KV cache, none is asked for.

    Raises:
        BudgetError: with settings that could work.
    """
    if any(stage.get("use") == "allocate_kv" for stage in ctx.config.stages.values()):
        held = ctx.ledger.non_torch_in(ctx.device.snapshot())
        room = _room(ctx, engine, held + weights, _unpaged(ctx, engine, kept_free=_library_bytes(ctx)))
        known = f"weights of {format_size(weights)}"
        refuse_if_no_request_fits(room, known, certain=False)
        left = room.ceiling_bytes - room.charged_bytes - room.size_of(room.least_blocks)
        # On a CPU other kernels run, and a plan knows its peaks by itself.
        if ctx.ledger.source in ("nvml_process", "device_delta") and left < _TIGHT * room.ceiling_bytes:
            peak = engine.least_peak() if isinstance(engine, Foresees) else 0
            tighter = replace(room, charged_bytes=room.charged_bytes + peak)
            refuse_if_no_request_fits(tighter, f"{known} and a step of at least {format_size(peak)}", certain=False)


def refuse_before_capture(ctx: Context, engine: Engine) -> None:
    """Refuse what cannot fit without graphs, rather than run out of memory while they are captured.

    Raises:
        BudgetError: with settings that could work.
    """
    if ctx.config.kv.bytes == "auto" and ctx.state.has(PROFILE):
        charged = held_bytes(ctx) + ctx.ledger.accounts["peak_activation"]
        refuse_if_no_request_fits(_room(ctx, engine, charged, _unpaged(ctx, engine)), _measured(ctx), certain=False)


def refuse_before_allocating(ctx: Context, engine: Engine) -> None:
    """Refuse where one request of the greatest length does not fit: it could never be served.

    Raises:
        BudgetError: with settings that would work.
    """
    charged = held_bytes(ctx) + ctx.ledger.accounts["peak_activation"]
    refuse_if_no_request_fits(_room(ctx, engine, charged, engine.kv_bytes), _measured(ctx))


def held_bytes(ctx: Context) -> int:
    """What is charged and stays, the KV cache apart."""
    accounts = ctx.ledger.accounts
    return accounts["weights"] + accounts["encoder_cache"] + accounts["cudagraph"] + outside_bytes(ctx)


def outside_bytes(ctx: Context) -> int:
    """Context, libraries, fragments; what was read and no account explains is not free either."""
    accounts = ctx.ledger.accounts
    known = accounts["context"] + accounts["non_torch"] + accounts["workspace"] + accounts["fragmentation"]
    return known + max(0, ctx.ledger.residual_bytes)


def wanted_blocks(config: Config, engine: Engine) -> int | None:
    """Usable blocks that the configuration asks for; None where it takes what is left."""
    size = config.kv.bytes
    if size == "auto":
        return None
    bytes_per_block = engine.kv_spec.bytes_per_block(config.kv.block_size)
    return needed_blocks(config, engine) if size == "need" else int(size) // bytes_per_block


def needed_blocks(config: Config, engine: Engine) -> int:
    """Usable blocks that the limits can fill at once."""
    return blocks_needed(
        num_seqs=config.scheduler.max_num_seqs, max_model_len=engine.max_model_len, block_size=config.kv.block_size
    )


def _room(ctx: Context, engine: Engine, charged: int, size_of: Callable[[int], int]) -> Room:
    kv = ctx.config.kv
    return Room(
        total_bytes=ctx.ledger.total_bytes,
        free_bytes=max(0, ctx.ledger.total_bytes - ctx.ledger.others_in(ctx.device.snapshot())),
        util=ctx.config.gpu.util,
        charged_bytes=charged,
        block_size=kv.block_size,
        bytes_per_block=engine.kv_spec.bytes_per_block(kv.block_size),
        max_model_len=engine.max_model_len,
        size_of=size_of,
        blocks=wanted_blocks(ctx.config, engine),
        most_seqs=ctx.config.scheduler.max_num_seqs if kv.bytes == "need" else None,
    )


def _unpaged(ctx: Context, engine: Engine, kept_free: int = 0) -> Callable[[int], int]:
    """Bytes of usable blocks and the padding block, before it is known in which pages memory comes.

    Args:
        kept_free: what weights and activations may not take either, while there is no KV cache.
    """
    bytes_per_block = engine.kv_spec.bytes_per_block(ctx.config.kv.block_size)
    return lambda blocks: max(kept_free, (blocks + 1) * bytes_per_block)


def _library_bytes(ctx: Context) -> int:
    """What the allocator's cap keeps for libraries until they are loaded; without a share to keep there is no cap."""
    return ctx.device.library_bytes if ctx.config.kv.bytes == "auto" else 0


def _measured(ctx: Context) -> str:
    peak = format_size(ctx.ledger.accounts["peak_activation"])
    by = f" set by {ctx.state.get(PROFILE).set_by}" if ctx.state.has(PROFILE) else ""
    return f"{format_size(held_bytes(ctx))} held and a peak of {peak}{by}{_origin(ctx)}"


def _origin(ctx: Context) -> str:
    """Of a peak that this start has not measured."""
    plan = ctx.state.get(STARTUP_PLAN) if ctx.state.has(STARTUP_PLAN) else None
    if plan is None or plan.learned is None or plan.checked:
        return ""
    return f" ({plan.origin}; startup_plan=refresh measures it)"
