"""Prompts of families whose processors do more than repeat a placeholder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import models

from orchestrator.engine.inputs import PromptBuilder
from orchestrator.engine.media import RequestError
from orchestrator.engine.positions import RopeIndex
from tests.tiny_families import QWEN_IMAGE, gemma3, qwen2_5_vl
from tests.tiny_models import image, make_config, make_engine, request

GEMMA_IMAGE = "<start_of_image>"


def merge_newlines(tokenizer: Any) -> None:
    """Two and three newlines become one token each, as real tokenizers have it."""
    vocabulary = {symbol: number for symbol, number in tokenizer.get_vocab().items() if number < 256}
    merges = [("Ċ", "Ċ"), ("ĊĊ", "Ċ")]
    tokenizer.backend_tokenizer.model = models.BPE(vocab={**vocabulary, "ĊĊ": 500, "ĊĊĊ": 501}, merges=merges)


@pytest.mark.parametrize(
    "text",
    [
        f"{GEMMA_IMAGE}",
        f"look:\n{GEMMA_IMAGE}\nwhat is it?",
        f"{GEMMA_IMAGE}{GEMMA_IMAGE}",
        f"one \n{GEMMA_IMAGE} two {GEMMA_IMAGE}\n\nthree",
    ],
)
def test_newlines_around_an_image_merge_with_the_texts(tmp_path: Path, text: str) -> None:
    gemma3(tmp_path)
    processor: Any = transformers.AutoProcessor.from_pretrained(tmp_path)  # type: ignore[no-untyped-call]
    merge_newlines(processor.tokenizer)
    mark = processor.tokenizer.image_token_id
    prompts = PromptBuilder(
        processor, {"image": GEMMA_IMAGE}, {"image": mark}, make_config(tmp_path).mm, whole_runs=True
    )
    pictures = [image(number) for number in range(text.count(GEMMA_IMAGE))]
    ids, items = prompts.prompt(request(text, *pictures, chat=False))
    assert ids == processor(text=[text], images=pictures, return_tensors="pt")["input_ids"][0].tolist()
    assert {500, 501} & set(ids)
    placed = [position for item in items for position in item.positions]
    assert placed == [at for at, token in enumerate(ids) if token == mark]
    assert [run for item in items for run in item.runs] == [(item.first, item.stop) for item in items]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    qwen2_5_vl(folder)
    return folder


def test_positions_are_the_models(qwen: Path) -> None:
    engine = make_engine(qwen)
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(qwen)
    asked = request(f"a {QWEN_IMAGE} b {QWEN_IMAGE} c", image(1, 120, 60), image(2, 60, 170), chat=False)
    batch = engine.processor(text=[asked.text], images=[media.data for media in asked.media], return_tensors="pt")
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw")
    positions, _ = model.model.get_rope_index(**{name: batch[name] for name in names})
    ids, items = engine._need().prompts.prompt(asked)
    axes = RopeIndex(model).axes(ids, items)
    assert [list(axis) for axis in axes.prompt] == positions[:, 0].tolist()
    last = positions[:, 0, -1].tolist()
    assert [axes.span(axis, len(ids), len(ids) + 1) for axis in range(3)] == [[place + 1] for place in last]
    assert last[0] < len(ids) - 1


def test_text_has_the_same_position_on_every_axis(qwen: Path) -> None:
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(qwen)
    axes = RopeIndex(model).axes([5, 6, 7], ())
    assert (axes.prompt, axes.span(2, 2, 5)) == (((0, 1, 2),) * 3, [2, 3, 4])


def test_images_that_the_model_cannot_place_fail_their_request_alone(qwen: Path) -> None:
    engine = make_engine(qwen)
    bad = request("<|image_pad|><|image_pad|>", image(1), image(2), chat=False, max_tokens=2)
    good = request(f"{QWEN_IMAGE}", image(1), chat=False, max_tokens=2)
    failed, served = engine.generate([bad, good])
    assert failed.error is not None and "cannot give positions to the items" in failed.error
    assert (served.error, len(served.token_ids)) == (None, 2)
    with pytest.raises(RequestError, match="positions"):
        loaded = engine._need()
        assert loaded.rope_index is not None
        loaded.rope_index.axes(*loaded.prompts.prompt(bad))
