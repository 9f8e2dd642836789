"""Allocate the KV cache: as many blocks as the ledger leaves, or as `kv.bytes` says."""

from __future__ import annotations

from typing import Any

from orchestrator.artifacts import ENGINE, GRAPHS, KV_CACHE, PROFILE, KVAllocation
from orchestrator.config import Config as RootConfig
from orchestrator.engine.base import Engine
from orchestrator.errors import BudgetError
from orchestrator.memory.budget import KVBudget, blocks_needed, kv_budget, max_model_len_that_fits
from orchestrator.stage import Context, Stage, StageConfig
from orchestrator.state import Key
from orchestrator.units import format_size


class AllocateKVConfig(StageConfig):
    """No options of its own: the size is `kv`, `gpu.util` and `scheduler`."""


class AllocateKV(Stage[AllocateKVConfig]):
    Config = AllocateKVConfig
    requires = (ENGINE, PROFILE)
    provides = (KV_CACHE,)

    def required(self, config: RootConfig) -> tuple[Key[Any], ...]:
        """A size that was given needs no profile."""
        return self.requires if config.kv.bytes == "auto" else (ENGINE,)

    def run(self, ctx: Context) -> str:
        engine, block_size = ctx.state.get(ENGINE), ctx.config.kv.block_size
        _reserve_encoder_cache(ctx, engine)
        bytes_per_block = engine.kv_spec.bytes_per_block(block_size)
        wanted = _wanted_blocks(ctx.config, engine, bytes_per_block)
        budget = _budget(ctx, None if wanted is None else engine.kv_bytes(wanted))
        blocks, limited_by = (wanted, str(budget.limited_by)) if wanted is not None else _auto(ctx, engine, budget)
        _refuse_if_too_few(blocks, engine, block_size, bytes_per_block, budget)
        taken = engine.allocate_kv(blocks)
        ctx.device.synchronize()
        ctx.ledger.charge("kv_cache", taken)
        _capture_again(ctx, engine)
        ctx.ledger.read_at_rest(ctx.device.snapshot())
        _cap(ctx)
        allocation = KVAllocation(blocks, block_size, bytes_per_block, blocks * bytes_per_block, limited_by)
        ctx.state.put(KV_CACHE, allocation)
        ctx.metrics.update(
            num_gpu_blocks=blocks, bytes=allocation.bytes, padding_bytes=bytes_per_block, limited_by=limited_by
        )
        return f"{blocks:,} blocks of {block_size} tokens, {format_size(taken)}, limited by {limited_by}"


def _reserve_encoder_cache(ctx: Context, engine: Engine) -> None:
    """What the profile does where there is one; an engine without an encoder cache could serve no media."""
    if not ctx.state.has(PROFILE) and engine.modalities():
        size = ctx.config.encoder.cache_size
        tokens = ctx.config.scheduler.max_num_batched_tokens if size == "auto" else size
        ctx.ledger.charge("encoder_cache", engine.reserve_encoder_cache(tokens))


def _cap(ctx: Context) -> None:
    """Let the allocator take no more than the ceiling leaves beside what it does not manage."""
    if ctx.config.kv.bytes == "auto":
        outside = ctx.ledger.non_torch_in(ctx.device.snapshot())
        ctx.device.limit(ctx.ledger.requested_bytes - outside)


def _auto(ctx: Context, engine: Engine, budget: KVBudget) -> tuple[int, str]:
    """Usable blocks where the configuration takes what is left, and what limited them."""
    blocks = _most_blocks(engine, budget.available_bytes, engine.kv_spec.bytes_per_block(ctx.config.kv.block_size))
    needed = _needed_blocks(ctx.config, engine)
    if ctx.ledger.source == "rss" and blocks > needed:
        # A CPU's memory is everybody's: blocks that no request can ever use are left to others.
        return needed, "need"
    return blocks, str(budget.limited_by)


def _most_blocks(engine: Engine, available: int, bytes_per_block: int) -> int:
    """Usable blocks that fit; one more is the padding block, and mapped memory comes in whole pages."""
    blocks = available // bytes_per_block - 1
    while blocks > 0 and engine.kv_bytes(blocks) > available:
        blocks -= 1
    return blocks


def _capture_again(ctx: Context, engine: Engine) -> None:
    """Graphs hold addresses: those that were captured before this cache existed read another one."""
    if not ctx.state.has(GRAPHS) or engine.keeps_graphs:
        return
    with ctx.span("capture graphs"):
        captured = engine.capture([graph.size for graph in ctx.state.get(GRAPHS).captured])
    ctx.metrics["graphs"] = [vars(graph) for graph in captured]
    ctx.device.empty_cache()


def _wanted_blocks(config: RootConfig, engine: Engine, bytes_per_block: int) -> int | None:
    """Usable blocks that the configuration asks for; None where it takes what is left."""
    size = config.kv.bytes
    if size == "auto":
        return None
    return _needed_blocks(config, engine) if size == "need" else int(size) // bytes_per_block


def _needed_blocks(config: RootConfig, engine: Engine) -> int:
    return blocks_needed(
        num_seqs=config.scheduler.max_num_seqs, max_model_len=engine.max_model_len, block_size=config.kv.block_size
    )


def _budget(ctx: Context, kv_bytes: int | None) -> KVBudget:
    accounts = ctx.ledger.accounts
    return kv_budget(
        total_bytes=ctx.ledger.total_bytes,
        util=ctx.config.gpu.util,
        weights=accounts["weights"],
        non_torch=accounts["context"] + accounts["non_torch"] + accounts["workspace"],
        peak_activation=accounts["peak_activation"],
        cudagraph=accounts["cudagraph"],
        encoder_cache=accounts["encoder_cache"],
        other_processes=ctx.ledger.others_in(ctx.device.snapshot()),
        kv_bytes=kv_bytes,
    )


def _refuse_if_too_few(blocks: int, engine: Engine, block_size: int, bytes_per_block: int, budget: KVBudget) -> None:
    """One request of the greatest length must fit, else it could never be served."""
    needed = blocks_needed(num_seqs=1, max_model_len=engine.max_model_len, block_size=block_size)
    if blocks >= needed:
        return
    fits = max_model_len_that_fits(
        available_bytes=max(0, blocks) * bytes_per_block,
        bytes_per_token=bytes_per_block // block_size,
        block_size=block_size,
    )
    raise BudgetError(
        f"one request of {engine.max_model_len} tokens takes {needed} blocks, and {max(0, blocks)} fit",
        wanted_bytes=(needed + 1) * bytes_per_block,
        free_bytes=budget.available_bytes,
        suggestions={"scheduler.max_model_len": str(fits)} if fits else {},
    )
