"""Videos and audio in float32: the engine's tokens are `generate`'s, its log-probabilities the model's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from orchestrator.engine.base import Media, Output, Request
from orchestrator.engine.media import frames_per_second, processor_arguments
from orchestrator.engine.transformers import TransformersEngine
from tests.tiny_media import MEDIA_FAMILIES, RATE, MediaFamily, asking, medium
from tests.tiny_models import make_engine

LIMITS = {"limit_per_prompt": {"image": 3, "video": 3, "audio": 3}}


@pytest.fixture(scope="module", params=MEDIA_FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> MediaFamily:
    found: MediaFamily = request.param
    return found


@pytest.fixture(scope="module")
def folder(family: MediaFamily, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family.folder(tmp_path_factory.mktemp(family.name))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    return getattr(transformers, config.architectures[0]).from_pretrained(folder)


def engine_on(folder: Path, tokens: int = 4096, micro_batch: int | str = "auto") -> TransformersEngine:
    return make_engine(
        folder,
        blocks=160,
        encoder_tokens=1024,
        mm=LIMITS,
        scheduler={"max_num_batched_tokens": tokens},
        encoder={"micro_batch": micro_batch},
    )


def alone(model: Any, processor: Any, asked: Request) -> list[int]:
    """The tokens of transformers' `generate` on the processor's own call on the whole request."""
    given = processor_arguments(asked.media, RATE, frames_per_second(processor))
    batch = processor(text=[asked.text], text_kwargs={"return_tensors": "pt"}, **given)
    settings: Any = transformers.GenerationConfig
    model.generation_config.eos_token_id = None
    ids = model.generate(
        **batch, generation_config=settings(max_new_tokens=asked.max_tokens, do_sample=False, pad_token_id=256)
    )
    tokens: list[int] = ids[0, batch["input_ids"].shape[1] :].tolist()
    return tokens


def assert_like_the_model(engine: TransformersEngine, model: Any, asked: list[Request], outputs: list[Output]) -> None:
    for one, output in zip(asked, outputs, strict=True):
        assert output.error is None
        assert output.token_ids == alone(model, engine.processor, one)
        chosen, best = engine.oracle_logprobs(one, output)
        assert output.logprobs == pytest.approx(chosen, abs=1e-4)
        assert chosen == pytest.approx(best, abs=1e-4)


def prompts(family: MediaFamily) -> list[Request]:
    """Each modality alone; two items of it around text; and all of them in one prompt, in both orders."""
    asked = [asking("a text without media")]
    for number, (kind, mark) in enumerate(family.marks.items()):
        asked.append(asking(f"look: {mark} so?", medium(kind, number)))
        asked.append(asking(f"{mark} and {mark} then", medium(kind, 10 + number), medium(kind, 20 + number)))
    if family.together and len(family.marks) > 1:
        for order in (list(family.marks.items()), list(family.marks.items())[::-1]):
            text = " then ".join(mark for _, mark in order)
            media = [medium(kind, 30 + number, scale=2) for number, (kind, _) in enumerate(order)]
            asked.append(asking(f"so: {text} end", *media))
    return asked


def test_the_engine_takes_what_the_model_takes(family: MediaFamily, folder: Path) -> None:
    assert set(engine_on(folder).modalities()) == set(family.marks)


@pytest.mark.parametrize(("tokens", "micro_batch"), [(29, "auto"), (4096, 3)])
def test_a_mixed_batch(family: MediaFamily, folder: Path, model: Any, tokens: int, micro_batch: int | str) -> None:
    """With few tokens a step chunks end inside items; with a micro-batch items share an encoder call."""
    engine = engine_on(folder, tokens, micro_batch)
    asked = prompts(family)
    assert_like_the_model(engine, model, asked, engine.generate(asked))


def test_a_list_of_pictures_is_the_video_that_the_array_is(family: MediaFamily, folder: Path) -> None:
    if "video" not in family.marks:
        return
    from PIL import Image

    engine = engine_on(folder)
    array = medium("video", 5)
    pictures = Media("video", [Image.fromarray(frame) for frame in array.data])
    one, other = engine.media_inputs(array), engine.media_inputs(pictures)
    assert one.content_hash == other.content_hash
    assert one.token_ids == other.token_ids


def test_two_kinds_that_a_processor_mixes_up_are_refused(family: MediaFamily, folder: Path) -> None:
    if family.together:
        return
    media = [medium(kind, 1) for kind in family.marks]
    (output,) = engine_on(folder).generate([asking("".join(family.marks.values()), *media)])
    assert output.error == "the model's processor cannot take image and video in one prompt"
