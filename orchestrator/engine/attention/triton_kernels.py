"""Attention over a paged cache as Triton kernels: one for sequences with one new token, one for sequences with many.

Both keep a running maximum and sum of the scores' exponentials (the online softmax of FlashAttention), read keys and
values through the block table, and take lengths from the device, so that a captured call serves any lengths.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _scores(query, keys, scale, visible, precision: tl.constexpr):
    """Scaled scores in base 2, so that exp2 can be used; minus infinity where a row may not look."""
    scores = tl.dot(query, tl.trans(keys), input_precision=precision) * (scale * 1.4426950408889634)
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def _update(scores, values, most, total, result, precision: tl.constexpr):
    """One step of the online softmax. A row that has seen nothing yet stays at minus infinity and zero."""
    new_most = tl.maximum(most, tl.max(scores, 1))
    safe = tl.where(new_most == float("-inf"), 0.0, new_most)
    weights = tl.exp2(scores - safe[:, None])
    fade = tl.exp2(most - safe)
    total = total * fade + tl.sum(weights, 1)
    result = result * fade[:, None]
    result = tl.dot(weights.to(values.dtype), values, result, input_precision=precision)
    return new_most, total, result


@triton.jit
def _load(
    cache, table, positions, head, used, stride_block, stride_token, stride_head, block_size, width,
    padded: tl.constexpr,
):  # fmt: skip
    """Keys or values of some positions of a sequence: (positions, padded head size)."""
    columns = tl.arange(0, padded)
    blocks = tl.load(table + positions // block_size, mask=used, other=0).to(tl.int64)
    rows = blocks * stride_block + (positions % block_size) * stride_token + head * stride_head
    return tl.load(cache + rows[:, None] + columns[None, :], mask=used[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit(do_not_specialize=["stride_table"])
def decode_kernel(
    query, k_cache, v_cache, block_tables, seq_lens, partial, maxima, sums,
    scale, window, block_size, width,
    stride_q_row, stride_q_head, stride_block, stride_token, stride_head, stride_table, stride_p_row, stride_p_head,
    stride_p_split,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A part (`split`) of one sequence's keys for the query heads that share one kv head."""
    sequence, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(seq_lens + sequence)
    per_split = tl.cdiv(tl.cdiv(length, SPLITS), KEYS) * KEYS
    start = split * per_split
    stop = tl.minimum(start + per_split, length)
    first = tl.maximum(length - window, 0)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, PADDED)
    heads = head * GROUP + rows
    used_q = (rows < GROUP)[:, None] & (columns < width)[None, :]
    at = sequence * stride_q_row + heads[:, None] * stride_q_head + columns[None, :]
    q = tl.load(query + at, mask=used_q, other=0.0)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, PADDED], tl.float32)
    table = block_tables + sequence * stride_table
    for position in range(tl.maximum(start, first // KEYS * KEYS), stop, KEYS):
        positions = position + tl.arange(0, KEYS)
        used = (positions < stop) & (positions >= first)
        keys = _load(
            k_cache, table, positions, head, used, stride_block, stride_token, stride_head, block_size, width, PADDED
        )  # fmt: skip
        scores = _scores(q, keys, scale, used[None, :], PRECISION)
        values = _load(
            v_cache, table, positions, head, used, stride_block, stride_token, stride_head, block_size, width, PADDED
        )  # fmt: skip
        most, total, result = _update(scores, values, most, total, result, PRECISION)
    base = sequence * stride_p_row + heads * stride_p_head + split * stride_p_split
    tl.store(partial + base[:, None] * width + columns[None, :], result, mask=used_q)
    tl.store(maxima + base, most, mask=rows < GROUP)
    tl.store(sums + base, total, mask=rows < GROUP)


@triton.jit
def combine_kernel(
    partial, maxima, sums, output, width, stride_o_row, stride_o_head, stride_p_row, stride_p_head,
    SPLITS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The parts of one sequence and query head into its result."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    splits, columns = tl.arange(0, SPLITS), tl.arange(0, PADDED)
    base = sequence * stride_p_row + head * stride_p_head + splits
    most = tl.load(maxima + base)
    best = tl.max(most, 0)
    weights = tl.exp2(most - tl.where(best == float("-inf"), 0.0, best))
    total = tl.sum(tl.load(sums + base) * weights, 0)
    used = columns < width
    parts = tl.load(partial + base[:, None] * width + columns[None, :], mask=used[None, :], other=0.0)
    result = tl.sum(parts * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    at = sequence * stride_o_row + head * stride_o_head + columns
    tl.store(output + at, result.to(output.dtype.element_ty), mask=used)


@triton.jit(
    # Neither the width of the tables nor where a step's prefills begin shall compile a kernel of its own.
    do_not_specialize=["stride_table"],
    do_not_specialize_on_alignment=["block_tables", "seq_lens", "query_start_loc"],
)
def prefill_kernel(
    query, k_cache, v_cache, block_tables, seq_lens, query_start_loc, output,
    scale, window, block_size, width,
    stride_q_row, stride_q_head, stride_block, stride_token, stride_head, stride_table, stride_o_row, stride_o_head,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of one sequence's new tokens, for one query head; the last new token sees all of the sequence."""
    # The last rows see the most keys: they start first, so that the device does not wait for them at the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head, sequence = tl.program_id(1), tl.program_id(2)
    begin = tl.load(query_start_loc + sequence)
    fresh = tl.load(query_start_loc + sequence + 1) - begin
    if block * ROWS >= fresh:
        return
    length = tl.load(seq_lens + sequence)
    context = length - fresh
    rows = block * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, PADDED)
    used_q = (rows < fresh)[:, None] & (columns < width)[None, :]
    row_at = (begin + rows).to(tl.int64)
    source = query + row_at[:, None] * stride_q_row + head * stride_q_head + columns[None, :]
    q = tl.load(source, mask=used_q, other=0.0)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, PADDED], tl.float32)
    table = block_tables + sequence * stride_table
    at = context + rows
    kv_head = head // GROUP
    stop = tl.minimum(context + (block + 1) * ROWS, length)
    first = tl.maximum(context + block * ROWS - window + 1, 0) // KEYS * KEYS
    # Keys that every row of the block may see need no comparison with the rows: they are most of a long sequence's.
    plain = tl.where(window > length, (context + block * ROWS + 1) // KEYS * KEYS, 0)
    for position in range(0, plain, KEYS):
        positions = position + tl.arange(0, KEYS)
        used = positions < length
        keys = _load(
            k_cache, table, positions, kv_head, used, stride_block, stride_token, stride_head, block_size, width, PADDED
        )  # fmt: skip
        scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * (scale * 1.4426950408889634)
        values = _load(
            v_cache, table, positions, kv_head, used, stride_block, stride_token, stride_head, block_size, width, PADDED
        )  # fmt: skip
        most, total, result = _update(scores, values, most, total, result, PRECISION)
    for position in range(tl.maximum(plain, first), stop, KEYS):
        positions = position + tl.arange(0, KEYS)
        used = positions < length
        keys = _load(
            k_cache, table, positions, kv_head, used, stride_block, stride_token, stride_head, block_size, width, PADDED
        )  # fmt: skip
        distance = at[:, None] - positions[None, :]
        scores = _scores(q, keys, scale, (distance >= 0) & (distance < window) & used[None, :], PRECISION)
        values = _load(
            v_cache, table, positions, kv_head, used, stride_block, stride_token, stride_head, block_size, width, PADDED
        )  # fmt: skip
        most, total, result = _update(scores, values, most, total, result, PRECISION)
    result = result / tl.where(total == 0.0, 1.0, total)[:, None]
    target = output + row_at[:, None] * stride_o_row + head * stride_o_head + columns[None, :]
    tl.store(target, result.to(output.dtype.element_ty), mask=used_q)
