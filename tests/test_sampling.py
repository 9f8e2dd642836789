"""Drawing tokens: the right distribution, the same noise in any batch, and what no token can be drawn with."""

from __future__ import annotations

import math

import pytest
import torch

from orchestrator.engine.base import Request
from orchestrator.engine.media import RequestError
from orchestrator.engine.sampling import Sampling, draw_tokens

LOGITS = torch.tensor([0.1, 2.0, 1.0, -1.0, 0.5])


def drawn(count: int, temperature: float, top_p: float, seed: int = 0, logits: torch.Tensor = LOGITS) -> torch.Tensor:
    sampling = Sampling(temperature, top_p, seed)
    return draw_tokens(logits.expand(count, -1), [sampling.draw(index) for index in range(count)])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_come_as_often_as_they_are_probable(temperature: float) -> None:
    count = 20_000
    shares = drawn(count, temperature, 1.0).bincount(minlength=5) / count
    expected = (LOGITS / temperature).softmax(-1)
    # Five standard deviations of a share.
    assert torch.all((shares - expected).abs() < 5 * (expected * (1 - expected) / count).sqrt())


def test_noise_is_spread_over_a_large_vocabulary() -> None:
    tokens = drawn(2000, 1.0, 1.0, logits=torch.zeros(50_000))
    assert abs(float(tokens.double().mean()) / 50_000 - 0.5) < 0.04
    assert len(set(tokens.tolist())) > 1900


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1.0, {0, 1, 2, 3, 4}), (0.6, {1, 2}), (0.5, {1}), (1e-9, {1}), (0.999999, {0, 1, 2, 3, 4})]
)
def test_top_p_keeps_as_few_as_have_the_probability(top_p: float, kept: set[int]) -> None:
    assert float(LOGITS.softmax(-1)[1]) > 0.5
    assert set(drawn(4000, 1.0, top_p).tolist()) == kept


def test_tokens_as_likely_as_the_last_that_is_kept_stay() -> None:
    assert set(drawn(2000, 1.0, 0.1, logits=torch.zeros(4)).tolist()) == {0, 1, 2, 3}


def test_a_row_draws_the_same_among_others() -> None:
    torch.manual_seed(0)
    logits = torch.randn(100, 300)
    draws = [Sampling(0.7 + row / 100, (1.0, 0.8)[row % 2], row).draw(row) for row in range(100)]
    together = draw_tokens(logits, draws).tolist()
    assert together == [int(draw_tokens(logits[row : row + 1], [draws[row]])) for row in range(100)]
    order = torch.randperm(100).tolist()
    assert draw_tokens(logits[order], [draws[row] for row in order]).tolist() == [together[row] for row in order]


def test_seeds_and_places_differ() -> None:
    flat = torch.zeros(1000)
    assert drawn(50, 1.0, 1.0, 1, flat).tolist() != drawn(50, 1.0, 1.0, 2, flat).tolist()
    assert len(set(drawn(50, 1.0, 1.0, 1, flat).tolist())) > 40


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 5e-324])
def test_a_temperature_near_zero_takes_the_likeliest(temperature: float) -> None:
    assert set(drawn(200, temperature, 1.0).tolist()) == {1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1: it must be 0 or a positive number"),
        ({"temperature": math.nan}, "temperature is nan: it must be 0 or a positive number"),
        ({"temperature": math.inf}, "temperature is inf: it must be 0 or a positive number"),
        ({"top_p": 0.0}, "top_p is 0.0: it must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p is 1.5: it must be above 0 and at most 1"),
        ({"seed": 0.5}, "seed is 0.5: it must be a whole number"),
    ],
)
def test_what_nothing_can_be_drawn_with_is_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        Sampling.of(Request("one", "text", **changes))  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_no_temperature_is_no_sampling() -> None:
    assert Sampling.of(Request("one", "text", top_p=0.5, seed=3)) is None
