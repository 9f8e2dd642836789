"""Each family in float32: the engine's tokens are `generate`'s, its log-probabilities the model's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from orchestrator.engine.base import Output, Request
from orchestrator.engine.transformers import TransformersEngine
from tests.tiny_families import FAMILIES, Family, text_only
from tests.tiny_models import alone, image, make_engine, request

LONG = "all there is to say about blocks, slots and pages of a cache; " * 2


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.param
    return found


@pytest.fixture(scope="module")
def folder(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family.folder(tmp_path_factory.mktemp(family.name))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(folder)


def mixed(mark: str) -> list[Request]:
    """Text, one image, two images of other shapes with text between, and an image between long texts."""
    return [
        request(f"{mark} what is this?", image(1), chat=False, max_tokens=10),
        request("a text without media", chat=False, max_tokens=6),
        request(f"first {mark} then {mark} end", image(2, 120, 60), image(3, 90, 150), chat=False, max_tokens=8),
        request(LONG, chat=False, max_tokens=5),
        request(f"{LONG}{mark}{LONG}", image(4, 60, 170), chat=False, max_tokens=9),
    ]


def assert_like_the_model(engine: TransformersEngine, model: Any, asked: list[Request], outputs: list[Output]) -> None:
    for one, output in zip(asked, outputs, strict=True):
        assert output.error is None
        assert output.token_ids == alone(model, engine.processor, one, one.text)
        chosen, best = engine.oracle_logprobs(one, output)
        assert output.logprobs == pytest.approx(chosen, abs=1e-4)
        assert chosen == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize("tokens_a_step", [24, 4096])
def test_a_mixed_batch(family: Family, folder: Path, model: Any, tokens_a_step: int) -> None:
    """With few tokens a step, chunks end inside images wherever the model allows it."""
    engine = make_engine(folder, blocks=160, encoder_tokens=512, scheduler={"max_num_batched_tokens": tokens_a_step})
    asked = mixed(family.image)
    assert_like_the_model(engine, model, asked, engine.generate(asked))


def test_several_images_in_one_encoder_call(family: Family, folder: Path, model: Any) -> None:
    engine = make_engine(folder, encoder_tokens=512, encoder={"micro_batch": 3})
    sizes = [(56, 56), (112, 56), (56, 112), (112, 56)]
    asked = [
        request(f"{family.image} {seed}", image(seed, *size), chat=False, max_tokens=3)
        for seed, size in enumerate(sizes)
    ]
    assert_like_the_model(engine, model, asked, engine.generate(asked))


def test_prompt_ids_are_the_processors(family: Family, folder: Path) -> None:
    engine = make_engine(folder, blocks=160, encoder_tokens=512)
    chats = [request("what are these?", image(1), image(2, 120, 60), max_tokens=2), request("nothing", max_tokens=2)]
    for one, output in zip(chats, engine.generate(chats), strict=True):
        text = f"<|im_start|>user\n{one.text}<|im_end|>\n<|im_start|>assistant\n"
        content: Any = [{"type": "image"} for _ in one.media] + [{"type": "text", "text": one.text}]
        text = engine.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        pictures = [media.data for media in one.media] or None
        batch = engine.processor(text=[text], images=pictures, return_tensors="pt")
        assert output.prompt_token_ids == batch["input_ids"][0].tolist()


@pytest.mark.parametrize("name", ["llama", "opt", "mistral", "qwen2", "gemma3_text"])
@pytest.mark.parametrize("tokens_a_step", [24, 4096])
def test_text_models(name: str, tokens_a_step: int, tmp_path: Path) -> None:
    folder = text_only(tmp_path, name)
    engine = make_engine(folder, encoder_tokens=0, scheduler={"max_num_batched_tokens": tokens_a_step})
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    asked = [request(f"{n} bottles of beer; " * n, chat=False, max_tokens=8 + n) for n in range(1, 6)]
    assert_like_the_model(engine, model, asked, engine.generate(asked))


def test_a_chunk_that_would_end_inside_an_image(family: Family, folder: Path, model: Any) -> None:
    """It does, but where an image's tokens look at each other: there it ends before them."""
    asked = [request(f"what is in this picture? {family.image} and why?", image(5, 120, 150), chat=False, max_tokens=6)]
    ids, (item,) = make_engine(folder, encoder_tokens=512)._need().prompts.prompt(asked[0])
    assert len(item.positions) > 2
    first = item.first + 1
    engine = make_engine(folder, encoder_tokens=512, scheduler={"max_num_batched_tokens": first})
    assert_like_the_model(engine, model, asked, engine.generate(asked))
    assert engine.steps[0].num_tokens == (item.first if family.name == "gemma3" else first)
    assert len(ids) > first
