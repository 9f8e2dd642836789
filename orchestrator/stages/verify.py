"""Verify: real requests through the started engine; none lost, each equal to the oracle, memory within what is held."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from orchestrator.artifacts import ENGINE, KV_CACHE, PROFILE, REHEARSED, VERIFIED
from orchestrator.config import Config as RootConfig
from orchestrator.engine.base import Engine, Media, Output, Request
from orchestrator.errors import VerificationError
from orchestrator.memory.sampler import PeakSampler
from orchestrator.stage import Context, Resolver, Skipped, Stage, StageConfig
from orchestrator.stages import checks, stress
from orchestrator.stages.photos import drawn_picture, open_photo, photo_files
from orchestrator.stages.plan_check import reserve_what_it_takes

QUESTIONS = (
    "Describe the picture.",
    "What is in the foreground, and what is behind it?",
    "Name three colours that you see, from the most frequent to the rarest.",
    "Is this indoors or outdoors?",
)
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.1}
"""How far a token's log-probability may be from the oracle's: rounding that grows over layers, in another order."""


class VerifyConfig(StageConfig):
    mode: Literal["quick", "stress", "off"] = "quick"
    """quick: a few requests, and the worst step unless this start rehearsed it; stress: also the worst step in any
    case, every block, the largest images, a long chat."""
    num_requests: int = Field(default=4, ge=1)
    """Requests in flight together; every other one carries an image, where the model takes images."""
    max_tokens: int = Field(default=16, ge=1)
    """Tokens that each request generates."""
    tolerance: float | None = Field(default=None, gt=0)
    """Largest difference of a log-probability from the oracle's; null for the dtype's own."""
    images: str | None = None
    """A folder of pictures; null for the photographs that scikit-learn or scikit-image bring."""


class Verify(Stage[VerifyConfig]):
    Config = VerifyConfig
    requires = (ENGINE, KV_CACHE)
    provides = (VERIFIED,)
    memory_knobs = ("a smaller KV cache by a size in kv.bytes",)

    def check(self, config: RootConfig, resolve: Resolver) -> None:
        photo_files(self.config.images)

    def run(self, ctx: Context) -> str:
        if self.config.mode == "off":
            raise Skipped("stages.verify.mode=off")
        if ctx.ledger.source == "planned":
            raise Skipped("a plan computes nothing that could be verified")
        engine = ctx.state.get(ENGINE)
        requests = self._requests(ctx, engine)
        with PeakSampler(ctx.device.process_bytes) as sampler:
            outputs = _serve(ctx, engine, requests, "generate", repeat_worst_step=self._repeats_worst_step(ctx))
            if self.config.mode == "stress":
                self._stress(ctx, engine)
        ctx.metrics.update(held_peak_bytes=checks.check_ceiling(ctx, sampler.peak), readings=sampler.readings)
        with ctx.span("oracle"):
            worst = checks.check_against_oracle(engine, requests, outputs, self._tolerance(engine))
        checks.check_left_as_found(ctx, engine)
        tokens = sum(len(output.token_ids) for output in outputs)
        images = sum(len(request.media) for request in requests)
        ctx.metrics.update(requests=len(requests), images=images, tokens=tokens, largest_difference=worst)
        ctx.metrics["tokens_sha256"] = checks.sha256_of_tokens(outputs)
        ctx.state.put(VERIFIED, True)
        counts = f"{len(requests)} requests, {images} images, {tokens} tokens"
        return f"{counts}, none lost, within {worst:.1e} of the oracle"

    def _repeats_worst_step(self, ctx: Context) -> bool:
        """Where the KV cache's size was given, nobody promised that the worst step fits beside it."""
        known = ctx.state.has(REHEARSED) and self.config.mode == "quick"
        return ctx.config.kv.bytes == "auto" and not known

    def _tolerance(self, engine: Engine) -> float:
        return self.config.tolerance or TOLERANCES[engine.kv_spec.dtype]

    def _requests(self, ctx: Context, engine: Engine) -> list[Request]:
        limits = ctx.config.mm
        with_images = limits.limit_per_prompt.image > 0 and "image" in engine.modalities()
        files = photo_files(self.config.images) if with_images else []
        if with_images and not files:
            ctx.events.info("verify: no photographs are installed (orchestrator[photos]); using drawn pictures")
        ctx.metrics["pictures"] = [path.name for path in files] or ("drawn" if with_images else "none")
        size = limits.image.max_size
        requests = []
        for number in range(self.config.num_requests):
            request = self._request(number, ())
            if with_images and number % 2 == 0:
                turn = number // 2
                picture = open_photo(files[turn % len(files)], size) if files else drawn_picture(turn, size)
                seeing = self._request(number, (Media("image", picture),))
                if engine.prompt_tokens(seeing) + self.config.max_tokens <= engine.max_model_len:
                    request = seeing
            requests.append(request)
        if with_images and not any(request.media for request in requests):
            ctx.events.info(f"verify: no picture fits into scheduler.max_model_len={engine.max_model_len}; text only")
        return requests

    def _request(self, number: int, media: tuple[Media, ...]) -> Request:
        text = QUESTIONS[number % len(QUESTIONS)]
        return Request(f"verify-{number}", text, media, self.config.max_tokens, ignore_eos=True)

    def _stress(self, ctx: Context, engine: Engine) -> None:
        blocks = ctx.state.get(KV_CACHE).num_blocks
        shapes = ctx.state.get(PROFILE).item_shapes if ctx.state.has(PROFILE) else {}
        media = stress.largest_media(shapes, ctx.config)
        filling = stress.filling_requests(engine, ctx.config, blocks, media)
        _serve(ctx, engine, filling, "stress: every block")
        used = engine.most_blocks_used
        if used < min(blocks, _usable(ctx, engine)):
            raise VerificationError(f"the load was to take {blocks} blocks, and took {used}")
        chat = stress.chat_requests(engine, self.config.max_tokens)
        for request in chat:
            _serve(ctx, engine, [request], f"stress: {request.request_id}")
        captured = _serve(ctx, engine, chat, "stress: captured")
        with engine.eager():
            eager = _serve(ctx, engine, chat, "stress: eager")
        difference = checks.check_captured_equals_eager(captured, eager, self._tolerance(engine))
        ctx.metrics["stress"] = {
            "requests": len(filling) + 3 * len(chat),
            "media": sum(len(request.media) for request in filling),
            "blocks_used": used,
            "turns": len(chat),
            "captured_against_eager": difference,
        }


def _serve(
    ctx: Context, engine: Engine, requests: Sequence[Request], span: str, *, repeat_worst_step: bool = False
) -> list[Output]:
    """Serve requests with the memory and the completeness checks around."""
    ctx.device.empty_cache()
    ctx.device.reset_peak()
    before = ctx.device.snapshot()
    with ctx.span(span):
        outputs = engine.generate(requests)
    if repeat_worst_step and ctx.state.has(PROFILE):
        with ctx.span("worst step"):
            engine.repeat_worst_step()
    after = ctx.device.snapshot()
    checks.check_none_lost(requests, outputs)
    # On a CPU the media that the engine keeps for requests to come lie in the memory that is read here.
    engine.clear_caches()
    ctx.device.empty_cache()
    cleared = ctx.device.snapshot()
    reserve_what_it_takes(ctx, engine, after.peak_bytes - before.allocated_bytes)
    ctx.metrics.setdefault("memory", []).append({"span": span, **checks.check_peak(ctx, before, after, cleared)})
    return outputs


def _usable(ctx: Context, engine: Engine) -> int:
    """Blocks that so many sequences of the greatest length can take at once."""
    return ctx.config.scheduler.max_num_seqs * (engine.max_model_len // ctx.config.kv.block_size)
