"""Sentences for what pydantic refuses."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from orchestrator.config import Config, Node, Size
from orchestrator.errors import ConfigError
from orchestrator.validation import annotation_at, describe, takes_only_text, validate


class Inner(Node):
    count: int = Field(gt=0, le=8)
    word: Literal["auto", "none"] | None


class Outer(Node):
    inner: Inner
    share: float = Field(gt=0, le=1)
    sizes: Literal["auto"] | list[int]
    pair: list[int] = Field(min_length=2, max_length=2)
    room: Literal["auto"] | Size
    named: bool = Field(alias="json")
    title: str | None


GOOD: dict[str, Any] = {
    "inner": {"count": 1, "word": None},
    "share": 0.5,
    "sizes": [1, 2],
    "pair": [1, 2],
    "room": "4GiB",
    "json": True,
    "title": None,
}


class Wide(BaseModel):
    model_config = ConfigDict(strict=True)

    limit: float | None = Field(gt=0)


def problems(**changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        validate(Outer, {**GOOD, **changes}, "node")
    return [str(problem) for problem in raised.value.problems]


def test_valid_values_become_the_model() -> None:
    assert validate(Outer, GOOD).room == 4 * 2**30


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"share": "0.5"},
            "node.share='0.5': must be a number above 0 and at most 1; without the quotes, node.share=0.5",
        ),
        ({"share": 2.0}, "node.share=2.0: must be a number above 0 and at most 1"),
        ({"inner": {"count": 9, "word": None}}, "node.inner.count=9: must be a whole number above 0 and at most 8"),
        (
            {"inner": {"count": 1, "word": "non"}},
            "node.inner.word=non: must be auto or none, or null; did you mean none?",
        ),
        (
            {"inner": {"count": 1, "wrd": None, "word": None}},
            "node.inner.wrd: there is no such key; did you mean word?",
        ),
        ({"inner": {"count": 1}}, "node.inner.word: is required"),
        ({"inner": 3}, "node.inner=3: must be a mapping with count, word"),
        ({"sizes": ["a"]}, "node.sizes=['a']: must be auto, or a list, each item a whole number"),
        ({"pair": [1, 2, 3]}, "node.pair=[1, 2, 3]: must be a list, each item a whole number, 2 of them"),
        ({"room": "big"}, "node.room=big: not a size; write for example 4GiB"),
        ({"room": 1e9}, "node.room=1000000000.0: not a size; write for example 4GiB"),
        ({"room": True}, "node.room=true: not a size; write for example 4GiB"),
        ({"room": None}, "node.room=null: not a size; write for example 4GiB"),
        ({"json": "yes"}, "node.json=yes: must be true or false"),
        ({"jsn": True}, "node.jsn: there is no such key; did you mean json?"),
        ({"title": 3}, "node.title=3: must be text, or null"),
    ],
)
def test_one_sentence_a_field(changes: dict[str, Any], sentence: str) -> None:
    found = problems(**changes)
    assert len(found) == 1
    assert found[0].startswith(sentence)


def test_all_problems_are_listed_once_each() -> None:
    assert len(problems(share="x", sizes=3, room=-1, inner={"count": "a", "word": 1})) == 5


def test_limits_are_said_of_the_number_and_not_of_null() -> None:
    assert describe(annotation_at(Wide, ["limit"])) == "a number above 0, or null"


def test_free_text_is_told_from_numbers_lists_and_words() -> None:
    text = ["model.path", "cache.dir", "run.dir", "engine.name"]
    other = ["gpu.util", "kv.bytes", "model.dtype", "graphs.sizes", "mm.processor_kwargs", "nothing.here"]
    assert all(takes_only_text(Config, name.split(".")) for name in text)
    assert not any(takes_only_text(Config, name.split(".")) for name in other)
