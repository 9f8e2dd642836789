from __future__ import annotations

import pytest

from orchestrator.engine.dummy_spans import dummy_spans


@pytest.mark.parametrize(
    ("tokens", "context", "length", "seqs", "spans"),
    [
        (8, 0, 32, 4, [(0, 8)]),
        (8, 24, 32, 4, [(24, 32)]),
        (8, 4, 32, 4, [(24, 32)]),
        (64, 0, 32, 4, [(0, 32), (0, 32)]),
        (64, 1, 32, 4, [(10, 32), (11, 32), (11, 32)]),
        (6, 31, 32, 4, [(30, 32), (30, 32), (31, 32), (31, 32)]),
        (500, 8, 32, 4, [(0, 32)] * 4),
        (4, 40, 32, 4, [(31, 32)] * 4),
    ],
)
def test_dummy_sequences_are_what_a_real_step_could_hold(
    tokens: int, context: int, length: int, seqs: int, spans: list[tuple[int, int]]
) -> None:
    assert dummy_spans(tokens, context, length, seqs) == spans
