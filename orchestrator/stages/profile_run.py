"""The profile run: a step at the limits, part by part, and what each part takes above what stays; or what an earlier
start of the same fingerprint measured."""

from __future__ import annotations

from orchestrator.artifacts import DUMMY, ENGINE, PROFILE
from orchestrator.engine.base import Engine
from orchestrator.engine.remembering import RemembersSteps
from orchestrator.memory.snapshot import peak_of
from orchestrator.modality.budget import EncoderBudget
from orchestrator.stage import Context, Stage, StageConfig
from orchestrator.stages.dummy_batch import make_batch
from orchestrator.stages.profiling import budget_for, compile_kernels, measure, note, step_tokens
from orchestrator.stages.room import refuse_before_capture
from orchestrator.startup_plan import Measured, StartupPlan, startup_plan
from orchestrator.units import format_size


class ProfileRunConfig(StageConfig):
    """No options of its own: what is profiled follows from `scheduler`, `encoder` and `mm`."""


class ProfileRun(Stage[ProfileRunConfig]):
    Config = ProfileRunConfig
    requires = (ENGINE, DUMMY)
    provides = (PROFILE,)
    memory_knobs = (
        "a smaller scheduler.max_num_batched_tokens",
        "a smaller encoder.compute_budget",
        "smaller images (mm.image.max_size, mm.processor_kwargs) or mm.limit_per_prompt.image=0",
    )

    def run(self, ctx: Context) -> str:
        engine, plan = ctx.state.get(ENGINE), startup_plan(ctx)
        taken_over = _take_over(ctx, engine, plan) if plan.learned is not None else None
        measured, budget = taken_over or _measure(ctx, engine, plan)
        profile = measured.profile(budget)
        ctx.ledger.charge("peak_activation", profile.peak_activation)
        _charge_non_torch(ctx)
        note(ctx, measured, budget)
        plan.note(ctx)
        ctx.state.put(PROFILE, profile)
        line = f"peak {format_size(profile.peak_activation)}, set by {profile.set_by}"
        if taken_over is None:
            return line
        refuse_before_capture(ctx, engine)
        return f"{line}, {plan.origin}"


def _measure(ctx: Context, engine: Engine, plan: StartupPlan) -> tuple[Measured, EncoderBudget]:
    dummy = ctx.state.get(DUMMY) if ctx.state.has(DUMMY) else make_batch(ctx, engine)[0]
    budget = budget_for(ctx.config, dummy.tokens_per_item)
    ctx.ledger.charge("encoder_cache", engine.reserve_encoder_cache(budget.cache_size))
    measured = plan.measured = measure(ctx, engine, dummy, budget)
    ctx.ledger.charge("workspace", measured.kept_bytes)
    ctx.peaks.update({name: part.above for name, part in measured.parts.items()})
    return measured, budget


def _take_over(ctx: Context, engine: Engine, plan: StartupPlan) -> tuple[Measured, EncoderBudget] | None:
    """What the plan knows, and the engine as a profile would have left it; None where the plan cannot be used.

    A short step loads what later steps run, so that the readings around the graphs are of the graphs.
    """
    assert plan.learned is not None and isinstance(engine, RemembersSteps)
    measured = plan.learned.facts.measured
    compiling = compile_kernels(ctx, engine)
    new, context = step_tokens(ctx, engine)
    rows = min(new, ctx.config.scheduler.max_num_seqs)
    with ctx.span("warm up"), peak_of(ctx.device) as warm:
        engine.dummy_step(rows, context)
        engine.dummy_logits(rows)
    try:
        engine.adopt_step(plan.learned.step)
    except ValueError as error:
        plan.drifted(ctx, f"its step cannot be used: {error}")
        return None
    budget = budget_for(ctx.config, measured.most_tokens)
    ctx.ledger.charge("encoder_cache", engine.reserve_encoder_cache(budget.cache_size))
    engine.set_micro_batch(measured.micro_batch, measured.piece_tokens)
    ctx.ledger.charge("workspace", compiling.kept_bytes + warm.kept_bytes)
    ctx.metrics.update(num_tokens=new, context_tokens=context)
    return measured, budget


def _charge_non_torch(ctx: Context) -> None:
    """What was loaded since the device was opened and torch did not allocate: kernels, libraries' own memory."""
    ctx.device.empty_cache()
    reading = ctx.device.snapshot()
    ctx.ledger.charge("non_torch", max(0, ctx.ledger.non_torch_in(reading) - ctx.ledger.accounts["context"]))
    ctx.ledger.charge("fragmentation", ctx.ledger.fragmentation_in(reading))
    ctx.ledger.read_at_rest(reading)
