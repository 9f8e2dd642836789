"""Plans beside what an H200 measured: the committed predictions, the goals, and the plan of today."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from orchestrator.planning import plan
from tests.gpu.compare import Compared, all_compared, compared
from tests.gpu.points import MEASURED, MODELS, PREDICTIONS, TEXT_MODELS, facts, points_of, read

QUICK = (("opt_125m", "1"), ("opt_125m", "16"), ("internvl2_5_8b", "4"), ("qwen2_audio_7b", "4"))
"""Points that are planned anew here: a text model, images and recordings, each in a few seconds."""

MISSES: dict[tuple[str, str, str], str] = {}
"""(model, point, quantity) -> why the prediction is farther from the measurement than the goal."""


def committed() -> Iterator[tuple[str, dict[str, Any]]]:
    for model in (*MODELS, *TEXT_MODELS):
        if (said := read(PREDICTIONS, model)) is not None:
            yield model, said


def test_predictions_are_of_the_points_and_whole() -> None:
    for model, said in committed():
        assert said["overrides"] == {point.name: point.overrides for point in points_of(model)}
        assert said["points"].keys() == said["overrides"].keys()
        assert {point["status"] for point in said["points"].values()} == {"ok"}
        assert len(said["sources"]) == 64


def test_what_was_measured_had_been_predicted() -> None:
    predicted = dict(committed())
    for model in (*MODELS, *TEXT_MODELS):
        if (found := read(MEASURED, model)) is not None:
            assert found["overrides"] == predicted[model]["overrides"]
            assert {point["status"] for point in found["points"].values()} == {"ok"}


def missed(rows: list[Compared]) -> set[tuple[str, str, str]]:
    return {(row.model, row.point, row.quantity) for row in rows if not row.ok}


def test_predictions_are_within_the_goals_or_say_why_not() -> None:
    assert missed(all_compared()) == MISSES.keys()


def test_the_plan_of_today_is_as_good_as_the_one_that_was_committed() -> None:
    predicted = dict(committed())
    for model, name in QUICK:
        point = next(point for point in points_of(model) if point.name == name)
        today = facts(plan(["gpu=h200", *point.overrides]))
        assert today["status"] == "ok", today["error"]
        found = read(MEASURED, model)
        if found is not None:
            assert missed(list(compared(model, name, today, found["points"][name]))) <= MISSES.keys()
        elif model in predicted:
            assert not missed(list(compared(model, name, today, predicted[model]["points"][name])))
