"""Greatest logit, its place and the sum of exponentials of a row, in one pass."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def likeliest_kernel(logits, tokens, logprobs, vocabulary, stride_row, COLUMNS: tl.constexpr):
    """One row. Each column of a tile keeps its own maximum and sum; they meet at the end."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    most = tl.full([COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    place = tl.zeros([COLUMNS], tl.int32)
    for start in range(0, vocabulary, COLUMNS):
        at = start + columns
        found = tl.load(logits + row * stride_row + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
        place = tl.where(found > most, at, place)
        higher = tl.maximum(most, found)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(most - safe) + tl.exp(found - safe)
        most = higher
    best = tl.max(most, 0)
    tl.store(tokens + row, tl.min(tl.where(most == best, place, vocabulary), 0).to(tl.int64))
    # The logit of the token is `best`, which the sum is relative to.
    tl.store(logprobs + row, -tl.log(tl.sum(total * tl.exp(most - best), 0)))
