"""The profile run: a step at the limits, part by part, and what each part takes above what stays."""

from __future__ import annotations

from orchestrator.artifacts import DUMMY, ENGINE, PROFILE, Profile
from orchestrator.config import Config
from orchestrator.engine.base import Engine
from orchestrator.memory.snapshot import Peak, peak_of
from orchestrator.modality.base import DummyBatch
from orchestrator.modality.budget import EncoderBudget, encoder_budget
from orchestrator.stage import Context, Stage, StageConfig
from orchestrator.stages.encoder_profile import profile_encoder
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
        engine, dummy = ctx.state.get(ENGINE), ctx.state.get(DUMMY)
        budget = _budget(ctx.config, dummy)
        ctx.ledger.charge("encoder_cache", engine.reserve_encoder_cache(budget.cache_size))
        parts = _profile_language_model(ctx, engine)
        # After the language model: what is reserved for that is the encoder's to use as well.
        encoder = profile_encoder(ctx, engine, dummy, budget, max(peak.charged_bytes for peak in parts.values()))
        parts |= encoder.parts
        peaks = {part: peak.charged_bytes for part, peak in parts.items()}
        shapes = {modality: item.shape for modality, item in dummy.items.items()}
        profile = Profile(
            peaks=peaks,
            encoder_budget=budget,
            item_shapes=shapes,
            micro_batch=encoder.micro_batch,
            piece_tokens=encoder.piece_tokens,
        )
        ctx.ledger.charge("peak_activation", profile.peak_activation)
        kept = encoder.trials_kept_bytes + sum(peak.kept_bytes for peak in parts.values())
        ctx.ledger.charge("workspace", kept)
        ctx.peaks.update({part: peak.above_bytes for part, peak in parts.items()})
        _charge_non_torch(ctx)
        ctx.metrics.update(
            peaks_bytes=peaks,
            allocated_bytes={part: peak.above_bytes for part, peak in parts.items()},
            kept_bytes={part: peak.kept_bytes for part, peak in parts.items()},
            set_by=profile.set_by,
            peak_activation_bytes=profile.peak_activation,
            encoder_compute_budget=budget.compute_budget,
            encoder_cache_size=budget.cache_size,
            items_per_step=budget.items_per_step,
            encoder_items=encoder.items,
            micro_batch=encoder.micro_batch,
            piece_tokens=encoder.piece_tokens,
            micro_batch_trials_bytes=encoder.trials,
        )
        ctx.state.put(PROFILE, profile)
        return f"peak {format_size(profile.peak_activation)}, set by {profile.set_by}"


def _budget(config: Config, dummy: DummyBatch) -> EncoderBudget:
    encoder = config.encoder
    return encoder_budget(
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_tokens_per_item=dummy.tokens_per_item,
        compute_budget=None if encoder.compute_budget == "auto" else encoder.compute_budget,
        cache_size=None if encoder.cache_size == "auto" else encoder.cache_size,
    )


def _profile_language_model(ctx: Context, engine: Engine) -> dict[str, Peak]:
    scheduler = ctx.config.scheduler
    new = min(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * engine.max_model_len)
    # A chunk at the end of the longest sequence reads the most context; without any, nothing is read from the cache.
    context = max(1, engine.max_model_len - new)
    with ctx.span("compile kernels"):
        engine.compile_kernels()
    with ctx.span("language_model"), peak_of(ctx.device) as step:
        engine.dummy_step(new, context)
    with ctx.span("logits"), peak_of(ctx.device) as logits:
        engine.dummy_logits(scheduler.max_num_seqs)
    ctx.metrics.update(num_tokens=new, context_tokens=context)
    return {"language_model": step, "logits": logits}


def _charge_non_torch(ctx: Context) -> None:
    """What was loaded since the device was opened and torch did not allocate: kernels, libraries' own memory."""
    ctx.device.empty_cache()
    reading = ctx.device.snapshot()
    ctx.ledger.charge("non_torch", max(0, ctx.ledger.non_torch_in(reading) - ctx.ledger.accounts["context"]))
    ctx.ledger.charge("fragmentation", ctx.ledger.fragmentation_in(reading))
