"""The budget's arithmetic, against values computed by hand."""

from __future__ import annotations

import itertools

import pytest

from orchestrator.errors import BudgetError
from orchestrator.memory.budget import (
    blocks_needed,
    cudagraph_bytes,
    kv_budget,
    kv_bytes_per_token,
    max_model_len_that_fits,
    refuse_if_not_free,
    requested_bytes,
    suggest_util,
)
from orchestrator.units import GiB


def gib(value: float) -> int:
    return round(value * GiB)


@pytest.mark.parametrize(
    ("weights", "non_torch", "activation", "kv"),
    [(14.96, 1.79, 1.26, 53.28), (7.48, 3.58, 1.26, 58.97), (19.86, 0.16, 36.63, 14.64)],
)
def test_what_is_left_of_a_card_of_79_gib(weights: float, non_torch: float, activation: float, kv: float) -> None:
    budget = kv_budget(
        total_bytes=gib(79.22),
        util=0.90,
        weights=gib(weights),
        non_torch=gib(non_torch),
        peak_activation=gib(activation),
    )
    assert budget.available_bytes / GiB == pytest.approx(kv, abs=0.02)
    assert budget.requested_bytes / GiB == pytest.approx(71.298, abs=0.001)
    assert budget.limited_by == "util"


@pytest.mark.parametrize("others", [0, 20, 55])
def test_what_others_hold_is_not_charged_to_us(others: int) -> None:
    budget = kv_budget(
        total_bytes=gib(79.15), util=0.2, weights=gib(8), non_torch=0, peak_activation=0, other_processes=gib(others)
    )
    assert budget.available_bytes / GiB == pytest.approx(7.83, abs=0.01)


def test_the_budget_shrinks_to_what_a_neighbour_left_free() -> None:
    budget = kv_budget(total_bytes=100, util=0.5, weights=10, non_torch=1, peak_activation=2, other_processes=60)
    assert (budget.available_bytes, budget.limited_by) == (40 - 13, "free")


def test_a_size_in_bytes_does_not_consult_the_fraction() -> None:
    budget = kv_budget(
        total_bytes=gib(80),
        util=0.9,
        weights=gib(2),
        non_torch=0,
        peak_activation=0,
        other_processes=gib(50),
        kv_bytes=gib(4),
    )
    assert (budget.available_bytes, budget.limited_by) == (gib(4), "kv_bytes")


def test_a_size_that_does_not_fit_is_refused_with_the_size_that_would() -> None:
    with pytest.raises(BudgetError, match=r"^kv\.bytes=16: .* 40 B are free; kv\.bytes=15 would work") as refused:
        kv_budget(
            total_bytes=100, util=0.1, weights=20, non_torch=5, peak_activation=0, other_processes=60, kv_bytes=16
        )
    assert (refused.value.wanted_bytes, refused.value.free_bytes) == (41, 40)


def test_nothing_left_names_a_util_that_works_and_it_does() -> None:
    with pytest.raises(BudgetError, match=r"^gpu\.util=0\.3 allows 300 B, and 330 B are charged") as refused:
        kv_budget(total_bytes=1000, util=0.3, weights=300, non_torch=20, peak_activation=10)
    works = float(refused.value.suggestions["gpu.util"])
    again = kv_budget(total_bytes=1000, util=works, weights=300, non_torch=20, peak_activation=10)
    assert (works, again.available_bytes) == (0.34, 10)


def test_no_util_is_suggested_where_none_works() -> None:
    with pytest.raises(BudgetError) as refused:
        kv_budget(total_bytes=1000, util=0.3, weights=990, non_torch=20, peak_activation=0)
    assert refused.value.suggestions == {}
    assert suggest_util(1000, 330, free_bytes=335) == {}


def test_every_byte_of_the_request_is_charged_or_left() -> None:
    sizes = (0, 1, 7, 64)
    for weights, non_torch, activation, graphs, encoder in itertools.product(sizes, repeat=5):
        charged = weights + non_torch + activation + graphs + encoder
        for total, util, others in itertools.product((100, 401), (0.25, 0.9, 1.0), (0, 50)):
            arguments = dict(
                total_bytes=total,
                weights=weights,
                non_torch=non_torch,
                peak_activation=activation,
                cudagraph=graphs,
                encoder_cache=encoder,
                other_processes=others,
            )
            ceiling = min(round(total * util), total - others)
            if charged >= ceiling:
                with pytest.raises(BudgetError):
                    kv_budget(util=util, **arguments)
            else:
                budget = kv_budget(util=util, **arguments)
                assert budget.available_bytes + charged == ceiling


@pytest.mark.parametrize(
    "name", ["total_bytes", "weights", "non_torch", "peak_activation", "other_processes", "kv_bytes"]
)
def test_a_negative_size_is_a_mistake_of_the_caller(name: str) -> None:
    sizes = dict(total_bytes=100, weights=1, non_torch=1, peak_activation=1, other_processes=0) | {name: -1}
    with pytest.raises(ValueError, match=f"{name} is -1"):
        kv_budget(util=0.5, **sizes)


@pytest.mark.parametrize("util", [0.0, -0.1, 1.01])
def test_a_util_outside_its_range_is_a_mistake_of_the_caller(util: float) -> None:
    with pytest.raises(ValueError, match="util is"):
        kv_budget(total_bytes=100, util=util, weights=1, non_torch=0, peak_activation=0)


def test_an_early_refusal_names_what_is_wanted_what_is_free_and_what_works() -> None:
    with pytest.raises(BudgetError, match=r"15\.83 GiB of 79\.15.*11\.14 GiB are free.*gpu\.util=0\.14") as refused:
        refuse_if_not_free(total_bytes=gib(79.15), util=0.2, free_bytes=gib(11.14))
    refuse_if_not_free(total_bytes=gib(79.15), util=0.14, free_bytes=refused.value.free_bytes)


@pytest.mark.parametrize("total", [100, 1000, gib(79.15), gib(139.8)])
def test_the_share_that_an_early_refusal_names_is_the_largest_that_fits(total: int) -> None:
    for step in range(1, 100):
        for free in (requested_bytes(total, step / 100), requested_bytes(total, (step + 1) / 100) - 1):
            with pytest.raises(BudgetError) as refused:
                refuse_if_not_free(total_bytes=total, util=1.0, free_bytes=free)
            assert refused.value.suggestions == {"gpu.util": f"{step / 100:.2f}"}


def test_a_decimal_fraction_does_not_lose_a_byte() -> None:
    assert requested_bytes(100, 0.29) == 29


def test_blocks_and_bytes_of_a_model_of_28_layers() -> None:
    per_token = kv_bytes_per_token(num_layers=28, num_kv_heads=8, head_dim=128, dtype_bytes=2)
    blocks = blocks_needed(num_seqs=1, max_model_len=1024, block_size=16)
    assert (blocks, blocks * 16 * per_token) == (64, 117_440_512)


def test_each_sequence_rounds_up_to_whole_blocks() -> None:
    assert blocks_needed(num_seqs=3, max_model_len=17, block_size=16) == 6


@pytest.mark.parametrize(("available", "tokens"), [(0, 0), (-5, 0), (159, 0), (160, 16), (1599, 144), (1600, 160)])
def test_the_longest_sequence_is_a_whole_number_of_blocks(available: int, tokens: int) -> None:
    assert max_model_len_that_fits(available_bytes=available, bytes_per_token=10, block_size=16) == tokens


@pytest.mark.parametrize(
    ("readings", "charged"), [([], 0), ([5], 0), ([5, 9], 4), ([5, 30, 20], 15), ([gib(20.5), 0], 0)]
)
def test_graphs_are_charged_what_the_readings_rose_by(readings: list[int], charged: int) -> None:
    assert cudagraph_bytes(readings) == charged
