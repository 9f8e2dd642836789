"""What `verify` holds an engine to: nothing lost, memory within what is reserved, outputs equal to the oracle's."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from orchestrator.artifacts import PROFILE
from orchestrator.engine.base import Engine, Output, Request
from orchestrator.errors import StillHeldError, VerificationError
from orchestrator.memory.snapshot import Snapshot
from orchestrator.stage import Context
from orchestrator.units import format_size


def check_none_lost(requests: Sequence[Request], outputs: Sequence[Output]) -> None:
    """Every request came back, without an error, with all of its tokens.

    Raises:
        VerificationError: names the first that did not.
    """
    by_id = {output.request_id: output for output in outputs}
    for request in requests:
        output = by_id.get(request.request_id)
        if output is None:
            came = f"{len(outputs)} of {len(requests)} came back"
            raise VerificationError(f"request {request.request_id} was lost: {came}")
        if output.error is not None:
            raise VerificationError(f"request {request.request_id} failed: {output.error}")
        if len(output.token_ids) != request.max_tokens:
            got = f"{len(output.token_ids)} tokens of {request.max_tokens}"
            raise VerificationError(f"request {request.request_id} has {got}")


def check_peak(ctx: Context, before: Snapshot, after: Snapshot, cleared: Snapshot) -> dict[str, int]:
    """Serving may take at its worst what was measured beforehand (if it was), and must give all of it back.

    Args:
        before: with the peak just reset.
        after: right after serving.
        cleared: with the caches of media and of the allocator emptied.

    Raises:
        VerificationError: how much it took or kept, and how much was reserved.
    """
    ctx.ledger.saw(after)
    reserved, slack = ctx.ledger.accounts["peak_activation"], ctx.device.memory_slack_bytes
    took = max(0, after.peak_bytes - before.allocated_bytes)
    kept = max(0, cleared.allocated_bytes - before.allocated_bytes)
    if kept > slack:
        raise VerificationError(f"serving kept {format_size(kept)} that it took: memory was allocated late")
    if ctx.state.has(PROFILE) and took > reserved + slack:
        raise VerificationError(
            f"serving took {format_size(took)} above what was held, and {format_size(reserved)} were reserved for it"
        )
    return {"peak_bytes": took, "reserved_bytes": reserved, "slack_bytes": slack, "kept_bytes": kept}


def check_ceiling(ctx: Context, process_peak: int) -> int:
    """What the process held at its worst, by readings of the whole process, against what was asked for.

    Returns:
        The bytes that this start held at its worst.

    Raises:
        VerificationError: it passed `gpu.util`. With `kv.bytes` the fraction was never promised, and where the whole
            device is read, a neighbour may have.
    """
    held = max(0, process_peak - ctx.ledger.base_bytes)
    ctx.ledger.peak_held_bytes = max(ctx.ledger.peak_held_bytes, held)
    own = ctx.config.kv.bytes == "auto" and ctx.ledger.source != "device_delta"
    if own and held > ctx.ledger.requested_bytes + ctx.device.memory_slack_bytes:
        raise VerificationError(
            f"this start held {format_size(held)}, and gpu.util={ctx.config.gpu.util:g} allows "
            f"{format_size(ctx.ledger.requested_bytes)}"
        )
    return held


def check_against_oracle(
    engine: Engine, requests: Sequence[Request], outputs: Sequence[Output], tolerance: float
) -> float:
    """Each chosen token's log-probability must be the oracle's, and no other token clearly likelier: by twice the
    tolerance, as its own may be off as well.

    Log-probabilities and not tokens are compared: a wrong context moves every one of them, whereas two nearly equal
    tokens change places for rounding alone.

    Returns:
        The largest difference found.

    Raises:
        VerificationError: names the request, the token and the three log-probabilities.
    """
    worst = 0.0
    for request, output in zip(requests, outputs, strict=True):
        chosen, best = engine.oracle_logprobs(request, output)
        for place, (ours, theirs, most) in enumerate(zip(output.logprobs, chosen, best, strict=True)):
            difference = max(abs(ours - theirs), (most - theirs) / 2)
            if not difference <= tolerance or math.isnan(ours):
                raise VerificationError(
                    f"request {request.request_id}, token {place}: log-probability {ours:.4f}, the oracle's "
                    f"{theirs:.4f} and its best {most:.4f}; the tolerance is {tolerance:g}"
                )
            worst = max(worst, difference)
    return worst


def sha256_of_tokens(outputs: Sequence[Output]) -> str:
    """Of the tokens that were generated, in the order of the requests: what a repeated start is compared by."""
    told = ";".join(f"{output.request_id}:{','.join(map(str, output.token_ids))}" for output in outputs)
    return hashlib.sha256(told.encode()).hexdigest()


def check_captured_equals_eager(captured: Sequence[Output], eager: Sequence[Output], tolerance: float) -> float:
    """Graphs replay what eager steps do: the log-probabilities of the tokens that both chose, up to the first token
    where rounding let them choose differently.

    Returns:
        The largest difference found.

    Raises:
        VerificationError: names the request and the token.
    """
    worst = 0.0
    for one, other in zip(captured, eager, strict=True):
        for place, (ours, theirs) in enumerate(zip(one.logprobs, other.logprobs, strict=True)):
            difference = abs(ours - theirs)
            if not difference <= tolerance:
                raise VerificationError(
                    f"request {one.request_id}, token {place}: log-probability {ours:.4f} by a captured step and "
                    f"{theirs:.4f} by an eager one; the tolerance is {tolerance:g}"
                )
            worst = max(worst, difference)
            if one.token_ids[place] != other.token_ids[place]:
                break
    return worst


def check_left_as_found(ctx: Context, engine: Engine) -> None:
    """Empties the caches.

    Raises:
        StillHeldError: what is in them all the same.
    """
    engine.clear_caches()
    ctx.device.empty_cache()
    held = {name: count for name, count in engine.held().items() if count}
    if held:
        raise StillHeldError(held)
    ctx.ledger.read_at_rest(ctx.device.snapshot())
