"""Allocate the KV cache: as many blocks as the ledger leaves, or as `kv.bytes` says."""

from __future__ import annotations

from typing import Any

from orchestrator.artifacts import ENGINE, KV_CACHE, PROFILE, KVAllocation
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
        bytes_per_block = engine.kv_spec.bytes_per_block(block_size)
        wanted = _wanted_blocks(ctx.config, engine, bytes_per_block)
        budget = _budget(ctx, None if wanted is None else (wanted + 1) * bytes_per_block)
        # One block more than requests can use: the padding block.
        blocks = budget.available_bytes // bytes_per_block - 1 if wanted is None else wanted
        _refuse_if_too_few(blocks, engine, block_size, bytes_per_block, budget)
        taken = engine.allocate_kv(blocks, block_size)
        ctx.device.synchronize()
        ctx.ledger.charge("kv_cache", taken)
        ctx.ledger.read_at_rest(ctx.device.snapshot())
        allocation = KVAllocation(blocks, block_size, bytes_per_block, blocks * bytes_per_block, budget.limited_by)
        ctx.state.put(KV_CACHE, allocation)
        ctx.metrics.update(
            num_gpu_blocks=blocks, bytes=allocation.bytes, padding_bytes=bytes_per_block, limited_by=budget.limited_by
        )
        return f"{blocks:,} blocks of {block_size} tokens, {format_size(taken)}, limited by {budget.limited_by}"


def _wanted_blocks(config: RootConfig, engine: Engine, bytes_per_block: int) -> int | None:
    """Usable blocks that the configuration asks for; None where it takes what is left."""
    size = config.kv.bytes
    if size == "auto":
        return None
    if size == "need":
        return blocks_needed(
            num_seqs=config.scheduler.max_num_seqs,
            max_model_len=engine.max_model_len,
            block_size=config.kv.block_size,
        )
    return int(size) // bytes_per_block


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
