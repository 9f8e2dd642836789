from __future__ import annotations

from typing import cast

import pytest

from orchestrator.errors import PipelineError
from orchestrator.state import Key, State

NUMBER = Key("number", int)


def test_a_value_comes_back_and_can_be_let_go() -> None:
    state = State()
    state.put(NUMBER, 3)
    assert state.get(NUMBER) == 3
    assert state.release(NUMBER)
    assert not state.has(NUMBER)
    assert not state.release(NUMBER)


def test_an_absent_value_says_why_it_is_absent() -> None:
    state = State()
    with pytest.raises(PipelineError, match="'number' has not been provided"):
        state.get(NUMBER)
    state.put(NUMBER, 3)
    state.release(NUMBER)
    with pytest.raises(PipelineError, match="'number' was released"):
        state.get(NUMBER)


def test_a_key_is_written_once_even_after_its_release() -> None:
    state = State()
    state.put(NUMBER, 3)
    state.release(NUMBER)
    with pytest.raises(PipelineError, match="provided twice"):
        state.put(NUMBER, 4)


def test_a_value_of_another_type_is_refused() -> None:
    with pytest.raises(PipelineError, match="is a int, not a str"):
        State().put(cast(Key[str], NUMBER), "3")
