"""Measuring a step at the limits, part by part: what the profile run does, and a start whose plan proved wrong."""

from __future__ import annotations

from orchestrator.config import Config
from orchestrator.engine.base import Engine
from orchestrator.memory.snapshot import Peak, peak_of
from orchestrator.modality.base import DummyBatch
from orchestrator.modality.budget import EncoderBudget, encoder_budget
from orchestrator.stage import Context
from orchestrator.stages.encoder_profile import profile_encoder
from orchestrator.startup_plan import Measured, Part


def measure(ctx: Context, engine: Engine, dummy: DummyBatch, budget: EncoderBudget) -> Measured:
    """The language model on the longest step, logits, and each modality through the encoder; leaves the engine with
    the micro-batch that was chosen."""
    compiling = compile_kernels(ctx, engine)
    parts = _language_model(ctx, engine)
    # After the language model: what is reserved for that is the encoder's to use as well.
    encoder = profile_encoder(ctx, engine, dummy, budget, max(peak.charged_bytes for peak in parts.values()))
    inputs = {part: sum(dummy.items[modality].num_bytes for modality in items) for part, items in encoder.items.items()}
    return Measured(
        parts={name: Part.of(peak, inputs.get(name, 0)) for name, peak in (parts | encoder.parts).items()},
        items=encoder.items,
        most_tokens=dummy.tokens_per_item,
        shapes={modality: list(item.shape) for modality, item in dummy.items.items()},
        micro_batch=encoder.micro_batch,
        piece_tokens=encoder.piece_tokens,
        trials=encoder.trials,
        trials_kept=encoder.trials_kept_bytes + compiling.kept_bytes,
    )


def budget_for(config: Config, most_tokens: dict[str, int]) -> EncoderBudget:
    """
    Args:
        most_tokens: of one item, by modality.
    """
    encoder = config.encoder
    return encoder_budget(
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_tokens_per_item=most_tokens,
        compute_budget=None if encoder.compute_budget == "auto" else encoder.compute_budget,
        cache_size=None if encoder.cache_size == "auto" else encoder.cache_size,
    )


def step_tokens(ctx: Context, engine: Engine) -> tuple[int, int]:
    """New tokens of the longest step, and the context that they follow.

    A chunk at the end of the longest sequence reads the most context; without any, nothing is read from the cache.
    """
    scheduler = ctx.config.scheduler
    new = min(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * engine.max_model_len)
    return new, max(1, engine.max_model_len - new)


def compile_kernels(ctx: Context, engine: Engine) -> Peak:
    with ctx.span("compile kernels"), peak_of(ctx.device) as peak:
        engine.compile_kernels()
    return peak


def _language_model(ctx: Context, engine: Engine) -> dict[str, Peak]:
    new, context = step_tokens(ctx, engine)
    with ctx.span("language_model"), peak_of(ctx.device) as step:
        engine.dummy_step(new, context)
    with ctx.span("logits"), peak_of(ctx.device) as logits:
        engine.dummy_logits(ctx.config.scheduler.max_num_seqs)
    ctx.metrics.update(num_tokens=new, context_tokens=context)
    return {"language_model": step, "logits": logits}


def note(ctx: Context, measured: Measured, budget: EncoderBudget) -> None:
    """Into the record of the stage that runs."""
    profile = measured.profile(budget)
    ctx.metrics.update(
        peaks_bytes=profile.peaks,
        allocated_bytes={name: part.above for name, part in measured.in_order},
        kept_bytes={name: part.kept for name, part in measured.in_order},
        set_by=profile.set_by,
        peak_activation_bytes=profile.peak_activation,
        encoder_compute_budget=budget.compute_budget,
        encoder_cache_size=budget.cache_size,
        items_per_step=budget.items_per_step,
        encoder_items=measured.items,
        micro_batch=measured.micro_batch,
        piece_tokens=measured.piece_tokens,
        micro_batch_trials_bytes=measured.trials,
    )
