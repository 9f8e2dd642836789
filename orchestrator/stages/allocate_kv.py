"""Allocate the KV cache: as many blocks as the ledger leaves, or as `kv.bytes` says."""

from __future__ import annotations

from typing import Any

from orchestrator.artifacts import ENGINE, GRAPHS, KV_CACHE, PROFILE, REHEARSED, KVAllocation
from orchestrator.config import Config as RootConfig
from orchestrator.engine.base import Engine
from orchestrator.memory.budget import LIMITS, KVBudget, kv_budget
from orchestrator.memory.fit import most_blocks
from orchestrator.stage import Context, Stage, StageConfig
from orchestrator.stages.plan_check import checked_rehearsal
from orchestrator.stages.room import needed_blocks, outside_bytes, refuse_before_allocating, wanted_blocks
from orchestrator.startup_plan import startup_plan
from orchestrator.state import Key
from orchestrator.units import format_size


class AllocateKVConfig(StageConfig):
    """No options of its own: the size is `kv`, `gpu.util` and `scheduler`."""


class AllocateKV(Stage[AllocateKVConfig]):
    Config = AllocateKVConfig
    requires = (ENGINE, PROFILE)
    provides = (KV_CACHE,)
    memory_knobs = ("a smaller KV cache by a size in kv.bytes",)

    def required(self, config: RootConfig) -> tuple[Key[Any], ...]:
        """A size that was given needs no profile."""
        return self.requires if config.kv.bytes == "auto" else (ENGINE,)

    def run(self, ctx: Context) -> str:
        engine, block_size = ctx.state.get(ENGINE), ctx.config.kv.block_size
        _reserve_encoder_cache(ctx, engine)
        _rehearse(ctx, engine)
        bytes_per_block = engine.kv_spec.bytes_per_block(block_size)
        wanted = wanted_blocks(ctx.config, engine)
        _note_neighbours(ctx)
        refuse_before_allocating(ctx, engine)
        budget = _budget(ctx, None if wanted is None else engine.kv_bytes(wanted))
        blocks, limited_by = (wanted, str(budget.limited_by)) if wanted is not None else _auto(ctx, engine, budget)
        # What libraries take is measured by now: what was kept for them beyond it is the cache's.
        _cap(ctx)
        taken = engine.allocate_kv(blocks)
        ctx.device.synchronize()
        ctx.ledger.charge("kv_cache", taken)
        _capture_again(ctx, engine)
        ctx.ledger.read_at_rest(ctx.device.snapshot())
        _cap(ctx)
        allocation = KVAllocation(blocks, block_size, bytes_per_block, blocks * bytes_per_block, limited_by)
        ctx.state.put(KV_CACHE, allocation)
        _keep_what_was_learned(ctx)
        ctx.metrics.update(
            num_gpu_blocks=blocks, bytes=allocation.bytes, padding_bytes=bytes_per_block, limited_by=limited_by
        )
        limit = LIMITS.get(limited_by, limited_by)
        return f"{blocks:,} blocks of {block_size} tokens, {format_size(taken)}, limited by {limit}"


def _reserve_encoder_cache(ctx: Context, engine: Engine) -> None:
    """What the profile does where there is one; an engine without an encoder cache could serve no media."""
    if not ctx.state.has(PROFILE) and engine.modalities():
        size = ctx.config.encoder.cache_size
        tokens = ctx.config.scheduler.max_num_batched_tokens if size == "auto" else size
        ctx.ledger.charge("encoder_cache", engine.reserve_encoder_cache(tokens))


def _rehearse(ctx: Context, engine: Engine) -> None:
    """Run the worst step once more, now that libraries are loaded, caches empty and graphs captured: what the allocator
    reserves for it, fragments included, is what serving must find free beside the KV cache. What the process then
    holds is read, so that the cache is sized by that and not by the sum of what was accounted for. A start-up plan is
    held against it, also where the cache's size is given; a CPU's readings are too coarse for that."""
    auto = ctx.config.kv.bytes == "auto"
    if ctx.state.has(PROFILE) and (auto or (startup_plan(ctx).learned is not None and ctx.ledger.source != "rss")):
        rehearsal = checked_rehearsal(ctx, engine)
        ctx.state.put(REHEARSED, True)
        if auto:
            ctx.ledger.charge("peak_activation", rehearsal.peak.charged_bytes)
        ctx.metrics.update(
            rehearsed_bytes=rehearsal.peak.reserved_bytes, rehearsed_allocated_bytes=rehearsal.peak.above_bytes
        )
    ctx.device.empty_cache()
    ctx.ledger.read_at_rest(ctx.device.snapshot())


def _keep_what_was_learned(ctx: Context) -> None:
    if ctx.state.has(PROFILE):
        plan = startup_plan(ctx)
        plan.compare_graphs(ctx)
        plan.keep(ctx)
        plan.note(ctx)


def _cap(ctx: Context) -> None:
    """Let the allocator take no more than the ceiling leaves beside what it does not manage."""
    if ctx.config.kv.bytes == "auto":
        outside = ctx.ledger.non_torch_in(ctx.device.snapshot())
        ctx.device.limit(ctx.ledger.requested_bytes - outside)


def _auto(ctx: Context, engine: Engine, budget: KVBudget) -> tuple[int, str]:
    """Usable blocks where the configuration takes what is left, and what limited them."""
    bytes_per_block = engine.kv_spec.bytes_per_block(ctx.config.kv.block_size)
    blocks = most_blocks(budget.available_bytes, bytes_per_block, engine.kv_bytes)
    needed = needed_blocks(ctx.config, engine)
    if ctx.ledger.source == "rss" and blocks > needed:
        # A CPU's memory is everybody's: blocks that no request can ever use are left to others.
        return needed, "need"
    return blocks, str(budget.limited_by)


def _capture_again(ctx: Context, engine: Engine) -> None:
    """Graphs hold addresses: those that were captured before this cache existed read another one."""
    if not ctx.state.has(GRAPHS) or engine.keeps_graphs:
        return
    with ctx.span("capture graphs"):
        captured = engine.capture([graph.size for graph in ctx.state.get(GRAPHS).captured])
    ctx.metrics["graphs"] = [vars(graph) for graph in captured]
    ctx.device.empty_cache()


def _budget(ctx: Context, kv_bytes: int | None) -> KVBudget:
    accounts = ctx.ledger.accounts
    return kv_budget(
        total_bytes=ctx.ledger.total_bytes,
        util=ctx.config.gpu.util,
        weights=accounts["weights"],
        non_torch=outside_bytes(ctx),
        peak_activation=accounts["peak_activation"],
        cudagraph=accounts["cudagraph"],
        encoder_cache=accounts["encoder_cache"],
        other_processes=ctx.ledger.others_in(ctx.device.snapshot()),
        kv_bytes=kv_bytes,
    )


def _note_neighbours(ctx: Context) -> None:
    """Others may come and go while a start measures. On a CPU they always do."""
    before, now = ctx.ledger.other_processes_at_start_bytes, ctx.ledger.others_in(ctx.device.snapshot())
    if ctx.ledger.source == "rss" or abs(now - before) <= ctx.device.memory_slack_bytes:
        return
    did = f"took {format_size(now - before)}" if now > before else f"gave back {format_size(before - now)}"
    ctx.events.info(f"other processes {did} while this start measured: not charged to it")
    ctx.metrics["others_changed_bytes"] = now - before
