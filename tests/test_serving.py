"""Serving through the real engine: sampling, stop conditions, streaming, cancelling, and threads that prepare media."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.engine.base import Event, Media, Output, Request
from orchestrator.engine.feed import Feed, worker_count
from orchestrator.engine.transformers import TransformersEngine
from orchestrator.errors import StageError
from tests.test_feed import with_a_picture
from tests.test_graphs import engine as graph_engine
from tests.tiny_models import PLACEHOLDER, image, internvl_folder, make_engine, request


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> TransformersEngine:
    return make_engine(internvl_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def everything_is_given_back(served: TransformersEngine) -> Iterator[None]:
    yield
    pool = served._need_memory().pool
    assert pool.num_free == pool.num_blocks
    index = served._need_encoder().index
    assert index.can_add(index.capacity)
    assert served.held()["requests"] == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("media")]


def texts(count: int, **changes: Any) -> list[Request]:
    base = [Request(str(at), f"Question {at}: {'why ' * at}", max_tokens=8, ignore_eos=True) for at in range(count)]
    return [replace(each, **changes) for each in base]


def with_images(count: int) -> list[Request]:
    return [request(PLACEHOLDER, image(at), name=str(at), chat=False, max_tokens=3) for at in range(count)]


def tokens(outputs: list[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def test_the_same_seed_gives_the_same_tokens_alone_and_in_a_batch(served: TransformersEngine) -> None:
    asked = [replace(each, temperature=1.0, top_p=(1.0, 0.9)[at % 2], seed=at) for at, each in enumerate(texts(4))]
    asked.insert(2, texts(1)[0])
    together = served.generate(asked)
    assert tokens(together) == [served.generate([each])[0].token_ids for each in asked]
    assert tokens(together) == tokens(served.generate(asked))
    assert together[0].token_ids != together[2].token_ids
    assert tokens(served.generate([replace(asked[0], seed=77)])) != tokens(together[:1])


def test_temperature_0_and_a_tiny_one_are_greedy(served: TransformersEngine) -> None:
    greedy = tokens(served.generate(texts(3)))
    assert tokens(served.generate(texts(3, temperature=0.0, top_p=0.3, seed=5))) == greedy
    assert tokens(served.generate(texts(3, temperature=1e-6))) == greedy
    assert tokens(served.generate(texts(3, temperature=1.0, top_p=1e-6))) == greedy


def test_logprobs_of_drawn_tokens_are_the_models(served: TransformersEngine) -> None:
    asked = texts(2, temperature=2.0, seed=3)
    for each, output in zip(asked, served.generate(asked), strict=True):
        theirs, _ = served.oracle_logprobs(each, output)
        assert output.logprobs == pytest.approx(theirs, abs=1e-3)


def test_captured_steps_draw_as_eager_ones(tiny_folder: Path) -> None:
    captured = graph_engine(tiny_folder)
    captured.allocate_kv(64)
    captured.capture([2, 8])
    asked = [*texts(2), *texts(2, temperature=1.0, top_p=0.95, seed=4)]
    replayed = captured.generate(asked)
    with captured.eager():
        eager = captured.generate(asked)
    assert tokens(replayed) == tokens(eager)
    assert tokens(captured.generate(asked[2:3])) == tokens(replayed[2:3])


def test_a_stop_string_ends_the_text_before_it(served: TransformersEngine) -> None:
    (free,) = served.generate(texts(1, max_tokens=24))
    # From the middle of one token to the middle of another.
    stop = free.text[5:9]
    (cut,) = served.generate(texts(1, max_tokens=24, stop=("never", stop)))
    assert cut.finish_reason == "stop"
    assert cut.text == free.text[: free.text.index(stop)]
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
    (whole,) = served.generate(texts(1, max_tokens=24, stop=("never",)))
    assert (whole.text, whole.finish_reason) == (free.text, "length")


def test_a_stop_token_ends_it_even_where_the_models_own_does_not(served: TransformersEngine) -> None:
    (free,) = served.generate(texts(1))
    last = free.token_ids[3]
    (cut,) = served.generate(texts(1, stop_token_ids=(last,)))
    assert cut.finish_reason == "stop"
    assert cut.token_ids == free.token_ids[: free.token_ids.index(last) + 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stop": "END"}, "stop is 'END': it must be a tuple of strings, such as ('END',)"),
        ({"stop": ("a", "")}, "stop has '': it must have strings of at least one character"),
        ({"stop": None}, "stop is None: it must be a tuple of strings, such as ('END',)"),
        ({"top_p": 2.0}, "top_p is 2.0: it must be above 0 and at most 1"),
        ({"top_p": "most"}, "top_p is 'most': it must be a number"),
        ({"temperature": None}, "temperature is None: it must be a number"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5: it must be a whole number"),
        ({"max_tokens": None}, "max_tokens is None: it must be a whole number"),
        ({"text": None}, "text is None: it must be a string"),
        ({"text": "a \ud83d"}, "text has '\\ud83d' at place 2: it must have whole characters"),
        ({"media": Media("image", image(1))}, "media is of type Media: it must be a tuple of Media"),
        ({"media": (image(1),)}, "media has one of type Image: it must be a tuple of Media"),
        ({"stop_token_ids": 5}, "stop_token_ids is of type int: it must be a tuple of token ids"),
        ({"stop_token_ids": ("a",)}, "stop_token_ids has one of type str: it must be a tuple of token ids"),
    ],
)
def test_a_wrong_setting_ends_its_request_alone(
    served: TransformersEngine, changes: dict[str, Any], message: str
) -> None:
    asked = texts(3)
    asked[1] = replace(asked[1], **changes)
    outputs = served.generate(asked)
    assert [output.error for output in outputs] == [None, message, None]
    events = [event for event in served.stream(asked) if event.request_id == "1"]
    assert [(event.finish_reason, event.error) for event in events] == [("error", message)]


def test_requests_may_come_from_a_generator(served: TransformersEngine) -> None:
    asked = with_images(3)
    outputs = served.generate(each for each in asked)  # type: ignore[arg-type]
    assert tokens(outputs) == tokens(served.generate(asked))
    events = list(served.stream(each for each in asked))  # type: ignore[arg-type]
    assert {event.request_id for event in events if event.finish_reason} == {"0", "1", "2"}


def test_streaming_equals_generate(served: TransformersEngine) -> None:
    asked = [*texts(4, temperature=1.0, max_tokens=20), *with_images(2)]
    asked = [replace(each, request_id=f"request {at}") for at, each in enumerate(asked)]
    stop = served.generate(asked[:1])[0].text[4:7]
    asked[0] = replace(asked[0], stop=(stop,))
    outputs = served.generate(asked)
    events = list(served.stream(asked))
    for output in outputs:
        mine = [event for event in events if event.request_id == output.request_id]
        assert [token for event in mine for token in event.token_ids] == output.token_ids
        assert [each for event in mine for each in event.logprobs] == output.logprobs
        assert "".join(event.text for event in mine) == output.text
        assert [event.finish_reason for event in mine] == ["" for _ in mine[1:]] + [output.finish_reason]
    assert events[0].finish_reason == ""


@pytest.mark.parametrize("after", [0, 1, 4, 9])
def test_cancel_at_any_time_gives_everything_back(served: TransformersEngine, after: int) -> None:
    asked = with_images(6)
    seen: list[Event] = []
    for number, event in enumerate(served.stream(asked)):
        if number == after:
            for each in asked[1::2]:
                served.cancel(each.request_id)
        seen.append(event)
    ends = {event.request_id: event.finish_reason for event in seen if event.finish_reason}
    assert len(ends) == 6
    assert {ends[each.request_id] for each in asked[::2]} <= {"length", "stop"}
    assert set(ends.values()) <= {"length", "stop", "cancelled"}
    assert after > 4 or "cancelled" in ends.values()
    assert sum(bool(event.finish_reason) for event in seen) == 6


def test_all_can_be_cancelled_and_a_stranger_is_left_alone(served: TransformersEngine) -> None:
    served.cancel("nobody")
    events = served.stream(texts(5, max_tokens=200))
    next(events)
    served.cancel("nobody")
    for number in range(5):
        served.cancel(str(number))
    assert {event.finish_reason for event in events} >= {"cancelled"}
    assert all(output.finish_reason == "length" for output in served.generate(texts(5)))


def test_cancel_from_another_thread(served: TransformersEngine) -> None:
    events = served.stream(texts(1, max_tokens=300))
    next(events)
    thread = threading.Thread(target=served.cancel, args=("0",))
    thread.start()
    thread.join()
    assert [event.finish_reason for event in events][-1] == "cancelled"


def test_a_closed_stream_gives_everything_back_and_lets_the_next_begin(served: TransformersEngine) -> None:
    events = served.stream(with_images(5))
    next(events)
    with pytest.raises(StageError, match="other requests are being served"):
        served.generate(texts(1))
    events.close()  # type: ignore[attr-defined]
    assert all(not output.error for output in served.generate(with_images(5)))


def test_a_failing_image_among_many(served: TransformersEngine) -> None:
    asked = with_images(12)
    asked[5] = replace(asked[5], media=(Media("image", "no image"),))
    outputs = served.generate(asked)
    assert [output.request_id for output in outputs] == [str(at) for at in range(12)]
    assert [bool(output.error) for output in outputs] == [at == 5 for at in range(12)]
    assert outputs[5].error == "an image must be a PIL image, not a str"


def test_threads_change_no_step(served: TransformersEngine) -> None:
    asked = with_images(8)
    runs = []
    for _ in range(2):
        served.clear_caches()
        runs.append((tokens(served.generate(asked)), list(served.steps)))
    assert runs[0] == runs[1]


def test_an_interrupt_in_a_step_leaves_no_thread(served: TransformersEngine) -> None:
    runner = served._need().runner
    execute = runner.execute

    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    runner.execute = interrupted  # type: ignore[assignment,method-assign]
    with pytest.raises(KeyboardInterrupt):
        served.generate(with_images(10))
    runner.execute = execute  # type: ignore[method-assign]
    assert all(not output.error for output in served.generate(with_images(3)))


def test_a_defect_on_a_thread_is_raised(served: TransformersEngine) -> None:
    prompts = served._need().prompts
    item = prompts.item

    def broken(media: Media) -> Any:
        raise ZeroDivisionError("a defect")

    prompts.item = broken  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError, match="a defect"):
        served.generate(with_images(4))
    prompts.item = item  # type: ignore[method-assign]


def test_threads_run_no_further_ahead_than_twice_their_number() -> None:
    from orchestrator.engine.encoder_cache import EncoderIndex
    from orchestrator.engine.generate import Limits, Scheduler
    from orchestrator.engine.kv_cache import BlockPool

    scheduler = Scheduler(Limits(64, 4, 16, 16), 4, BlockPool(64), EncoderIndex(16))
    opened: list[str] = []

    def noted(asked: Request) -> Any:
        opened.append(asked.request_id)
        return with_a_picture(asked)

    asked = [Request(str(at), "right", (Media("image", None),)) for at in range(50)]
    feed = Feed(asked, noted, scheduler, ahead=4, workers=2)
    feed.refill()
    feed.close()
    assert len(feed.opened) == 4
    assert len(opened) <= 4 + 2 * 2
    assert 1 <= worker_count() <= 8
