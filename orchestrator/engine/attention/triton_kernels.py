"""Attention over a paged cache as Triton kernels: one for sequences with one new token, one for sequences with many.

Both keep a running maximum and sum of the scores' exponentials (the online softmax of FlashAttention), read keys and
values through the block table, and take lengths from the device, so that a captured call serves any lengths. Scores are
scaled where they are exponentiated, in base 2: `factor` is the scale over ln 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Numbers and pointers that differ from step to step must not compile a kernel of their own.
_ANY_VALUE = ["window", "stride_table"]
_ANY_ALIGNMENT = ["block_tables", "seq_lens", "query_start_loc"]


@triton.jit
def _update(scores, values, most, total, result, factor, SEEN: tl.constexpr, PRECISION: tl.constexpr):
    """One step of the online softmax. A row that has seen nothing yet stays at minus infinity and zero; with `SEEN`
    there is none."""
    new_most = tl.maximum(most, tl.max(scores, 1) * factor)
    safe = new_most if SEEN else tl.where(new_most == float("-inf"), 0.0, new_most)
    weights = tl.exp2(scores * factor - safe[:, None])
    fade = tl.exp2(most - safe)
    total = total * fade + tl.sum(weights, 1)
    result = result * fade[:, None]
    result = tl.dot(weights.to(values.dtype), values, result, input_precision=PRECISION)
    return new_most, total, result


@triton.jit
def _load(
    cache, table, positions, head, used, stride_block, stride_token, stride_head,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Keys or values of some positions of a sequence: (positions, padded head size). With `ALL` every position is
    there, and `used` is not asked."""
    columns = tl.arange(0, PADDED)
    blocks = tl.load(table + positions // BLOCK) if ALL else tl.load(table + positions // BLOCK, mask=used, other=0)
    rows = blocks.to(tl.int64) * stride_block + (positions % BLOCK) * stride_token + head * stride_head
    at = cache + rows[:, None] + columns[None, :]
    if not ALL:
        loaded = tl.load(at, mask=used[:, None] & (columns < WIDTH)[None, :], other=0.0)
    elif WIDTH == PADDED:
        loaded = tl.load(at)
    else:
        loaded = tl.load(at, mask=(columns < WIDTH)[None, :], other=0.0)
    return loaded


@triton.jit(do_not_specialize=_ANY_VALUE, do_not_specialize_on_alignment=_ANY_ALIGNMENT)
def decode_kernel(
    query, k_cache, v_cache, block_tables, seq_lens, parts, sums, scale, window,
    stride_q_row, stride_q_head, stride_block, stride_token, stride_head, stride_table,
    stride_p_row, stride_p_head, stride_p_split,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PADDED: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A part (`split`) of one sequence's keys for the query heads that share one kv head. With one split `parts` gets
    the result, and `sums` nothing."""
    sequence, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(seq_lens + sequence)
    factor = scale * 1.4426950408889634
    per_split = tl.cdiv(tl.cdiv(length, SPLITS), KEYS) * KEYS
    start = split * per_split
    stop = tl.minimum(start + per_split, length)
    first = tl.maximum(length - window, 0)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, PADDED)
    heads = head * GROUP + rows
    used_q = (rows < GROUP)[:, None] & (columns < WIDTH)[None, :]
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
            k_cache, table, positions, head, used, stride_block, stride_token, stride_head, BLOCK, WIDTH, PADDED, False
        )  # fmt: skip
        scores = tl.dot(q, tl.trans(keys).to(q.dtype), input_precision=PRECISION)
        scores = tl.where(used[None, :], scores, float("-inf"))
        values = _load(
            v_cache, table, positions, head, used, stride_block, stride_token, stride_head, BLOCK, WIDTH, PADDED, False
        )  # fmt: skip
        most, total, result = _update(scores, values, most, total, result, factor, False, PRECISION)
    target = (
        parts + sequence * stride_p_row + heads[:, None] * stride_p_head + split * stride_p_split + columns[None, :]
    )
    if SPLITS == 1:
        result = result / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(target, result.to(parts.dtype.element_ty), mask=used_q)
    else:
        tl.store(target, result, mask=used_q)
        pair = sums + ((sequence * tl.num_programs(1) * GROUP + heads) * SPLITS + split) * 2
        tl.store(pair, most, mask=rows < GROUP)
        tl.store(pair + 1, total, mask=rows < GROUP)


@triton.jit
def combine_kernel(
    parts, sums, output, stride_o_row, stride_o_head, stride_p_row, stride_p_head,
    WIDTH: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The parts of one sequence and query head into its result."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    splits, columns = tl.arange(0, SPLITS), tl.arange(0, PADDED)
    pair = sums + ((sequence * tl.num_programs(1) + head) * SPLITS + splits) * 2
    most = tl.load(pair)
    best = tl.max(most, 0)
    weights = tl.exp2(most - tl.where(best == float("-inf"), 0.0, best))
    total = tl.sum(tl.load(pair + 1) * weights, 0)
    used = columns < WIDTH
    at = sequence * stride_p_row + head * stride_p_head + splits[:, None] * WIDTH + columns[None, :]
    each = tl.load(parts + at, mask=used[None, :], other=0.0)
    result = tl.sum(each * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    target = output + sequence * stride_o_row + head * stride_o_head + columns
    tl.store(target, result.to(output.dtype.element_ty), mask=used)


@triton.jit(do_not_specialize=_ANY_VALUE, do_not_specialize_on_alignment=_ANY_ALIGNMENT)
def prefill_kernel(
    query, k_cache, v_cache, block_tables, seq_lens, query_start_loc, output, scale, window,
    stride_q_row, stride_q_head, stride_block, stride_token, stride_head, stride_table, stride_o_row, stride_o_head,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PADDED: tl.constexpr, PRECISION: tl.constexpr,
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
    factor = scale * 1.4426950408889634
    context = length - fresh
    rows = block * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, PADDED)
    used_q = (rows < fresh)[:, None] & (columns < WIDTH)[None, :]
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
        keys = _load(
            k_cache, table, positions, kv_head, rows, stride_block, stride_token, stride_head, BLOCK, WIDTH, PADDED,
            True,
        )  # fmt: skip
        scores = tl.dot(q, tl.trans(keys).to(q.dtype), input_precision=PRECISION)
        values = _load(
            v_cache, table, positions, kv_head, rows, stride_block, stride_token, stride_head, BLOCK, WIDTH, PADDED,
            True,
        )  # fmt: skip
        most, total, result = _update(scores, values, most, total, result, factor, True, PRECISION)
    for position in range(tl.maximum(plain, first), stop, KEYS):
        positions = position + tl.arange(0, KEYS)
        used = positions < length
        keys = _load(
            k_cache, table, positions, kv_head, used, stride_block, stride_token, stride_head, BLOCK, WIDTH, PADDED,
            False,
        )  # fmt: skip
        distance = at[:, None] - positions[None, :]
        scores = tl.dot(q, tl.trans(keys).to(q.dtype), input_precision=PRECISION)
        scores = tl.where((distance >= 0) & (distance < window) & used[None, :], scores, float("-inf"))
        values = _load(
            v_cache, table, positions, kv_head, used, stride_block, stride_token, stride_head, BLOCK, WIDTH, PADDED,
            False,
        )  # fmt: skip
        most, total, result = _update(scores, values, most, total, result, factor, False, PRECISION)
    result = result / tl.where(total == 0.0, 1.0, total)[:, None]
    target = output + row_at[:, None] * stride_o_row + head * stride_o_head + columns[None, :]
    tl.store(target, result.to(output.dtype.element_ty), mask=used_q)
