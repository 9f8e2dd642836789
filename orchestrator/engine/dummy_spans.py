"""Which positions a step of made-up tokens has, so that it is the costliest within the limits."""

from __future__ import annotations


def dummy_spans(num_tokens: int, context: int, max_model_len: int, max_num_seqs: int) -> list[tuple[int, int]]:
    """New positions (start, stop) of sequences that share `num_tokens` new tokens after a context.

    As few sequences as can each have at least `context` tokens before their new ones; with a context they end at
    `max_model_len`, where it costs most. Where that would be more than `max_num_seqs`, the context is shortened, and
    tokens beyond `max_num_seqs * max_model_len`, which no step can hold, are left out.
    """
    num_tokens = min(num_tokens, max_num_seqs * max_model_len)
    room = max(1, max_model_len - context)
    count = min(-(-num_tokens // room), max_num_seqs)
    sizes = [num_tokens // count + (index < num_tokens % count) for index in range(count)]
    return [(max_model_len - size, max_model_len) if context else (0, size) for size in sizes]


def new_spans(num_tokens: int, max_model_len: int, max_num_seqs: int) -> list[tuple[int, int]]:
    """New positions of a step like `dummy_spans`' without context: of odd lengths, which kernels pad, and beside a
    decode, so that outputs are put together."""
    if num_tokens < 3 or max_num_seqs < 2:
        return dummy_spans(num_tokens, 0, max_model_len, max_num_seqs)
    return [(1, 2), *dummy_spans(num_tokens - 2, 0, max_model_len, max_num_seqs - 1)]
