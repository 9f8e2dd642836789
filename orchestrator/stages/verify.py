"""Verify: real requests through the started engine; none lost, each equal to the oracle, memory within what is held."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import Field

from orchestrator.artifacts import ENGINE, KV_CACHE, PROFILE, VERIFIED
from orchestrator.config import Config as RootConfig
from orchestrator.engine.base import Engine, Media, Output, Request
from orchestrator.errors import StillHeldError, VerificationError
from orchestrator.memory.snapshot import Snapshot
from orchestrator.stage import Context, Resolver, Stage, StageConfig
from orchestrator.stages.photos import drawn_picture, open_photo, photo_files
from orchestrator.units import format_size

QUESTIONS = (
    "Describe the picture.",
    "What is in the foreground, and what is behind it?",
    "Name three colours that you see, from the most frequent to the rarest.",
    "Is this indoors or outdoors?",
)
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.1}
"""How far a token's log-probability may be from the oracle's: rounding that grows over layers, in another order."""


class VerifyConfig(StageConfig):
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

    def check(self, config: RootConfig, resolve: Resolver) -> None:
        photo_files(self.config.images)

    def run(self, ctx: Context) -> str:
        engine = ctx.state.get(ENGINE)
        requests = self._requests(ctx, engine)
        ctx.device.empty_cache()
        ctx.device.reset_peak()
        before = ctx.device.snapshot()
        with ctx.span("generate"):
            outputs = engine.generate(requests)
        after = ctx.device.snapshot()
        _check_none_lost(requests, outputs, self.config.max_tokens)
        # On a CPU the media that the engine keeps for requests to come lie in the memory that is read here.
        engine.clear_caches()
        ctx.device.empty_cache()
        ctx.metrics.update(_check_peak(ctx, before, after, ctx.device.snapshot()))
        with ctx.span("oracle"):
            worst = _check_against_oracle(engine, requests, outputs, self._tolerance(engine))
        _leave_as_found(ctx, engine)
        tokens = sum(len(output.token_ids) for output in outputs)
        images = sum(len(request.media) for request in requests)
        ctx.metrics.update(requests=len(requests), images=images, tokens=tokens, largest_difference=worst)
        ctx.state.put(VERIFIED, True)
        counts = f"{len(requests)} requests, {images} images, {tokens} tokens"
        return f"{counts}, none lost, within {worst:.1e} of the oracle"

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


def _check_none_lost(requests: Sequence[Request], outputs: Sequence[Output], max_tokens: int) -> None:
    by_id = {output.request_id: output for output in outputs}
    for request in requests:
        output = by_id.get(request.request_id)
        if output is None:
            came = f"{len(outputs)} of {len(requests)} came back"
            raise VerificationError(f"request {request.request_id} was lost: {came}")
        if output.error is not None:
            raise VerificationError(f"request {request.request_id} failed: {output.error}")
        if len(output.token_ids) != max_tokens:
            got = len(output.token_ids)
            raise VerificationError(f"request {request.request_id} has {got} tokens of {max_tokens}")


def _check_peak(ctx: Context, before: Snapshot, after: Snapshot, cleared: Snapshot) -> dict[str, int]:
    """Serving may take at its worst what the profile measured (if one ran), and must give all of it back."""
    ctx.ledger.saw(after)
    reserved, slack = ctx.ledger.accounts["peak_activation"], ctx.device.memory_slack_bytes
    took = max(0, after.peak_bytes - before.allocated_bytes)
    kept = max(0, cleared.allocated_bytes - before.allocated_bytes)
    if ctx.state.has(PROFILE) and took > reserved + slack:
        raise VerificationError(
            f"serving took {format_size(took)} above what was held, and {format_size(reserved)} were reserved for it"
        )
    if kept > slack:
        raise VerificationError(f"serving kept {format_size(kept)} that it took: memory was allocated late")
    return {"peak_bytes": took, "reserved_bytes": reserved, "slack_bytes": slack, "kept_bytes": kept}


def _check_against_oracle(
    engine: Engine, requests: Sequence[Request], outputs: Sequence[Output], tolerance: float
) -> float:
    """Each chosen token's log-probability must be the oracle's, and no other token clearly likelier; the largest
    difference found. Log-probabilities and not tokens are compared: a wrong context moves every one of them, whereas
    two nearly equal tokens change places for rounding alone."""
    worst = 0.0
    for request, output in zip(requests, outputs, strict=True):
        chosen, best = engine.oracle_logprobs(request, output)
        for place, (ours, theirs, most) in enumerate(zip(output.logprobs, chosen, best, strict=True)):
            difference = max(abs(ours - theirs), most - theirs)
            if not difference <= tolerance or math.isnan(ours):
                raise VerificationError(
                    f"request {request.request_id}, token {place}: log-probability {ours:.4f}, the oracle's "
                    f"{theirs:.4f} and its best {most:.4f}; the tolerance is {tolerance:g}"
                )
            worst = max(worst, difference)
    return worst


def _leave_as_found(ctx: Context, engine: Engine) -> None:
    engine.clear_caches()
    ctx.device.empty_cache()
    held = {name: count for name, count in engine.held().items() if count}
    if held:
        raise StillHeldError(held)
    ctx.ledger.read_at_rest(ctx.device.snapshot())
