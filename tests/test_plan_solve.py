"""Searches over planned starts, against every value around the answer."""

from __future__ import annotations

import pytest

from orchestrator.compose import compose
from orchestrator.config import Config
from orchestrator.errors import ConfigError, UserError
from orchestrator.plan.cards import chosen_card, without_card
from orchestrator.plan.fit import lines, table
from orchestrator.plan.planner import Planner
from orchestrator.plan.solve import Solver, as_text, command_with
from orchestrator.registry import Registry
from tests.planning import ITEM_TOKENS, FormulaPlan, record_of

BASE = ["model=tiny_internvl", "kv.bytes=auto", "scheduler.max_model_len=2048", "scheduler.max_num_seqs=4"]
POSITIONS = 32768
REGISTRY = Registry.discover()


def planner(*more: str, weights_gib: float = 4.0) -> tuple[Planner, FormulaPlan]:
    plan = FormulaPlan(weights=int(weights_gib * 2**30))
    return Planner([*BASE, *more], REGISTRY, plan), plan


def config(*more: str) -> Config:
    return compose(["device=plan", "gpu=l4", *BASE, *more]).config


def starts(weights_gib: float, *more: str) -> bool:
    return record_of(config(*more), int(weights_gib * 2**30)).status == "ok"


def test_the_smallest_share() -> None:
    found, plan = planner()
    solution = Solver(found, "l4").solve("gpu.util")
    step = round(float(solution.value) * 100)
    assert starts(4.0, f"gpu.util={step / 100}") and not starts(4.0, f"gpu.util={(step - 1) / 100}")
    assert solution.checks == {f"{step / 100:.2f}": True, f"{(step - 1) / 100:.2f}": False}
    assert solution.plans == len(plan.asked) == 3
    assert solution.command.endswith(f"scheduler.max_num_seqs=4 gpu.util={solution.value}")


@pytest.mark.parametrize("weights_gib", [17.8, 18.2])
def test_the_longest_sequence(weights_gib: float) -> None:
    found, plan = planner(weights_gib=weights_gib)
    solution = Solver(found, "l4").solve("max_model_len")
    length = int(solution.value)
    assert 16 <= length < POSITIONS and length % 16 == 0
    assert starts(weights_gib, f"scheduler.max_model_len={length}")
    assert not starts(weights_gib, f"scheduler.max_model_len={length + 1}")
    assert solution.checks == {str(length): True, str(length + 1): False}
    assert "memory" in solution.binds and len(plan.asked) <= 8


def test_no_length_fits() -> None:
    found, _ = planner(weights_gib=19.5)
    with pytest.raises(UserError, match=r"no scheduler\.max_model_len fits on gpu=l4 at gpu\.util=0\.9: .* would work"):
        Solver(found, "l4").solve("max_model_len")


def test_the_models_own_limit_binds_where_memory_does_not() -> None:
    found, _ = planner()
    solution = Solver(found, "h200").solve("max_model_len")
    assert (solution.value, solution.binds) == ("32768", "the model has positions for 32,768 tokens")
    assert solution.checks == {"32768": True}
    # The setting is given once, in the place of the one that was.
    assert solution.command.count("max_model_len") == 1


def test_the_most_sequences_at_once() -> None:
    found, plan = planner("gpu.util=0.5")
    solution = Solver(found, "l4").solve("max_num_seqs")
    count = int(solution.value)

    def holds(number: int) -> bool:
        record = record_of(config("gpu.util=0.5", f"scheduler.max_num_seqs={number}"), 4 * 2**30)
        return record.kv_cache is not None and record.kv_cache.max_concurrency >= number

    assert holds(count) and not holds(count + 1)
    assert solution.checks == {str(count): True, str(count + 1): False}
    assert len(plan.asked) <= 10


@pytest.mark.parametrize(("asked", "more"), [("max_num_seqs", ()), ("max_model_len", ("scheduler.max_num_seqs=3",))])
def test_what_the_limits_need_may_pass_the_share_and_fill_the_card(asked: str, more: tuple[str, ...]) -> None:
    found, plan = planner("kv.bytes=need", "gpu.util=0.3", *more, weights_gib=18)
    solution = Solver(found, "l4").solve(asked)
    number = int(solution.value)
    assert solution.checks == {str(number): True, str(number + 1): False}
    given = ("kv.bytes=need", "gpu.util=0.3", *more)
    assert [starts(18, *given, f"{solution.setting}={each}") for each in (number, number + 1)] == [True, False]
    assert "of 22.02 GiB" in solution.binds and len(plan.asked) <= 10


def test_what_the_limits_need_is_held_against_the_card_that_was_asked_about() -> None:
    found, _ = planner("kv.bytes=need", "scheduler.max_num_seqs=20000")
    (line,) = lines(found, ["h200"], [])
    assert "2560000 blocks of the KV cache" in line.fit.refusal and "there are 139.79 GiB" in line.fit.refusal
    assert line.fit.suggestions.keys() >= {"scheduler.max_num_seqs", "kv.bytes"}


def test_a_size_of_the_cache_is_what_binds() -> None:
    found, _ = planner("kv.bytes=24MiB")
    solution = Solver(found, "l4").solve("max_model_len")
    assert (solution.value, solution.binds) == ("768", "kv.bytes=25165824 holds 768 tokens")
    found, _ = planner("kv.bytes=24MiB", "scheduler.max_model_len=256")
    solution = Solver(found, "l4").solve("max_num_seqs")
    assert solution.checks == {"3": True, "4": False}


def test_the_most_images_end_with_the_sequence_or_with_memory() -> None:
    found, _ = planner()
    solution = Solver(found, "h200").solve("images")
    assert int(solution.value) == 2047 // ITEM_TOKENS
    assert "a sequence has 2,048" in solution.binds
    found, _ = planner("gpu.util=0.25")
    solution = Solver(found, "l4").solve("images")
    count = int(solution.value)
    given = [f"gpu.util=0.25 mm.limit_per_prompt.image={number}".split() for number in (count, count + 1)]
    assert [starts(4.0, *each) for each in given] == [True, False]
    assert solution.checks == {str(count): True, str(count + 1): False}


def test_what_never_fits_is_the_users_mistake() -> None:
    found, _ = planner(weights_gib=30)
    with pytest.raises(UserError, match=r"no gpu.util fits on gpu=l4: 30\.\d+ GiB held"):
        Solver(found, "l4").solve("gpu.util")


def test_a_table_makes_one_plan_for_cards_that_plan_alike() -> None:
    found, plan = planner()
    rows = list(lines(found, ["l4", "a10g", "h200", "h100_80g"], [0.1, 0.5, 0.9]))
    assert len(rows) == 12 and len(plan.asked) == 2
    for line in rows:
        spec = found.config(line.card).gpu.spec
        assert spec is not None
        record = record_of(
            compose(["device=plan", f"gpu={line.card}", *BASE, f"gpu.util={line.fit.util}"]).config, 4 * 2**30
        )
        assert line.fit.fits == (record.status == "ok")
        assert record.kv_cache is None or line.fit.blocks == record.kv_cache.num_gpu_blocks
        assert line.longest <= POSITIONS
    text = table(rows).splitlines()
    assert len(text) == 13 and text[0].split()[:3] == ["card", "util", "fits"]
    assert "gpu.util=0.26 would work" in text[1] or "would work" in text[1]


def test_the_card_is_taken_out_of_the_overrides() -> None:
    rest, card = without_card(["gpu=h200", "device=cuda", "device.kind=cpu", "gpu.util=0.5", "model=opt_125m"])
    assert (rest, card) == (["gpu.util=0.5", "model=opt_125m"], "h200")
    with pytest.raises(ConfigError, match="gpu=h20: there is no card of that name; did you mean h200"):
        chosen_card("h20", found_cards())
    with pytest.raises(ConfigError, match="gpu: is required"):
        chosen_card(None, found_cards())


def found_cards() -> tuple[str, ...]:
    return planner()[0].cards


def test_the_command_quotes_what_a_shell_would_change() -> None:
    command = command_with(["mm.processor_kwargs={max_patches: 1}", "gpu.util=0.5"], "gpu.util", "0.60")
    assert command == "python -m orchestrator 'mm.processor_kwargs={max_patches: 1}' gpu.util=0.60"


def test_the_answer_says_how_it_was_checked() -> None:
    found, _ = planner()
    text = as_text(Solver(found, "l4").solve("gpu.util"), "l4").splitlines()
    assert [line.split()[0] for line in text[1:]] == ["binds", "checked", "checked", "start"]
