"""Holding a start-up plan against the started process; and profiling after all where it does not hold."""

from __future__ import annotations

from orchestrator.artifacts import PROFILE
from orchestrator.engine.base import Engine
from orchestrator.stage import Context
from orchestrator.stages.dummy_batch import make_batch
from orchestrator.stages.profiling import budget_for, measure, note
from orchestrator.stages.rehearsal import Rehearsal, rehearse
from orchestrator.startup_plan import StartupPlan, deviation, startup_plan


def checked_rehearsal(ctx: Context, engine: Engine) -> Rehearsal:
    """The rehearsal of this start: with the plan's step, or the profile's where the plan proves wrong by it."""
    plan = startup_plan(ctx)
    # A resident set strays by more than what is looked for; what the rehearsal reads replaces the plan's figure anyway.
    held_against = plan.learned is not None and ctx.ledger.source != "rss"
    rehearsal = rehearse(ctx, engine, by_part=held_against)
    _charge_what_stayed(ctx, rehearsal)
    plan.checked = plan.learned is not None
    if plan.learned is None or not held_against:
        return rehearsal
    why = deviation(plan.learned.facts.measured, rehearsal.parts, ctx.device.memory_slack_bytes)
    if why is None:
        return rehearsal
    _profile_after_all(ctx, engine, plan, why)
    rehearsal = rehearse(ctx, engine, by_part=False)
    _charge_what_stayed(ctx, rehearsal)
    return rehearsal


def reserve_what_it_takes(ctx: Context, engine: Engine, took_bytes: int) -> None:
    """Where serving took more than a plan reserves that no rehearsal was held against (where the KV cache's size is
    given), run it now: what it shows is reserved, and the plan goes."""
    plan = startup_plan(ctx) if ctx.state.has(PROFILE) else None
    reserved, slack = ctx.ledger.accounts["peak_activation"], ctx.device.memory_slack_bytes
    if plan is None or plan.learned is None or plan.checked or took_bytes <= reserved + slack:
        return
    rehearsal = rehearse(ctx, engine, by_part=False)
    plan.checked = True
    ctx.ledger.charge("peak_activation", max(reserved, rehearsal.peak.charged_bytes))
    if took_bytes <= ctx.ledger.accounts["peak_activation"] + slack:
        plan.drifted(ctx, "serving takes more than it reserves; the next start profiles anew")
        plan.note(ctx)


def _profile_after_all(ctx: Context, engine: Engine, plan: StartupPlan, why: str) -> None:
    plan.drifted(ctx, f"{why}; profiling anew")
    dummy, _ = make_batch(ctx, engine)
    budget = budget_for(ctx.config, dummy.tokens_per_item)
    if budget != ctx.state.get(PROFILE).encoder_budget:
        ctx.ledger.charge("encoder_cache", engine.reserve_encoder_cache(budget.cache_size))
    measured = plan.measured = measure(ctx, engine, dummy, budget)
    engine.clear_caches()
    ctx.state.correct(PROFILE, measured.profile(budget))
    ctx.ledger.charge("peak_activation", measured.profile(budget).peak_activation)
    ctx.ledger.charge("workspace", ctx.ledger.accounts["workspace"] + measured.kept_bytes)
    note(ctx, measured, budget)


def _charge_what_stayed(ctx: Context, rehearsal: Rehearsal) -> None:
    """A step that runs for the first time here loads kernels and leaves workspaces; after a profile there are none."""
    accounts = ctx.ledger.accounts
    ctx.ledger.charge("workspace", accounts["workspace"] + rehearsal.peak.kept_bytes)
    ctx.ledger.charge("non_torch", accounts["non_torch"] + rehearsal.loaded_bytes)
