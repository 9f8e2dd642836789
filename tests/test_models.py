"""The embedded model: a folder like any other."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from orchestrator.checkpoint import check, locate
from orchestrator.compose import compose
from orchestrator.config import ModelConfig
from orchestrator.device.cpu import CpuDevice
from orchestrator.engine.models.tiny_internvl import TinyInternVL
from orchestrator.engine.models.tokenizer import byte_tokenizer, chat_template, token_ids
from orchestrator.engine.weights.safetensors import SafetensorsLoader
from orchestrator.events import SilentEvents


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    TinyInternVL().make(path)
    return path


@pytest.fixture(scope="module")
def processor(folder: Path) -> Any:
    auto: Any = AutoProcessor
    return auto.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder)


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def _answer(model: Any, processor: Any, image: Image.Image | None, text: str) -> list[int]:
    parts = [{"type": "image"}] if image is not None else []
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True)
    inputs = processor(images=[image] if image is not None else None, text=[prompt], return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    tokens: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens


def test_the_folder_is_the_same_each_time(folder: Path, tmp_path: Path) -> None:
    TinyInternVL().make(tmp_path)
    assert _digests(tmp_path) == _digests(folder)


def test_it_is_found_as_a_checkpoint_and_loaded(tmp_path: Path, model: Any) -> None:
    asked = ModelConfig(
        name="tiny_internvl",
        path=None,
        revision=None,
        dtype="auto",
        load_format="auto",
        trust_remote_code=False,
        profiler="auto",
    )
    checkpoint = locate(asked, make=lambda _: TinyInternVL(), cache_dir=tmp_path)
    check(checkpoint, asked, frozenset({"float32"}))
    auto: Any = AutoModelForImageTextToText
    with torch.device("meta"):
        loaded = auto.from_config(AutoConfig.from_pretrained(checkpoint.folder))
    with SilentEvents().progress("weights", checkpoint.total_bytes, "B") as progress:
        SafetensorsLoader().load(
            loaded,
            checkpoint,
            device=CpuDevice(),
            dtype=torch.float32,
            seed=0,
            progress=progress,
            options=compose([]).config.weights,
        )
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())


def test_its_size(model: Any) -> None:
    assert type(model).__name__ == "InternVLForConditionalGeneration"
    assert 3_000_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 6_000_000
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert model.lm_head.weight is not model.get_input_embeddings().weight


@pytest.mark.parametrize(
    ("size", "tiles"), [((224, 224), 1), ((896, 672), 13), ((672, 896), 13), ((640, 427), 7), ((10, 10), 1)]
)
def test_tiles_and_their_tokens(processor: Any, size: tuple[int, int], tiles: int) -> None:
    inputs = processor(images=[Image.new("RGB", size)], text=["<IMG_CONTEXT>"], return_tensors="pt")
    assert inputs["pixel_values"].shape == (tiles, 3, 224, 224)
    assert int((inputs["input_ids"] == processor.image_token_id).sum()) == tiles * 64


def test_answers_depend_on_the_image_and_the_text(model: Any, processor: Any) -> None:
    red, striped = Image.new("RGB", (224, 224), "red"), Image.radial_gradient("L").convert("RGB")
    answers = [
        _answer(model, processor, image, text)
        for image in (red, striped, None)
        for text in ("What?", "How many are there?")
    ]
    assert len({tuple(answer) for answer in answers}) == len(answers)
    assert all(len(set(answer)) > 2 for answer in answers)


def test_answers_are_visible_characters(model: Any, processor: Any) -> None:
    text = processor.tokenizer.decode(_answer(model, processor, None, "Say something"), skip_special_tokens=True)
    assert text
    assert text.isascii()
    assert text.isprintable()


def test_chat_template_takes_strings_and_parts(processor: Any) -> None:
    plain = processor.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert plain == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    parts = [{"type": "image"}, {"type": "video"}, {"type": "text", "text": "Hi "}]
    mixed = processor.apply_chat_template([{"role": "user", "content": parts}])
    assert mixed == "<|im_start|>user\n<IMG_CONTEXT>\n<video>\nHi <|im_end|>\n"


def test_video(processor: Any, model: Any) -> None:
    frames = torch.randint(0, 255, (4, 3, 64, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    inputs = processor(videos=[frames], text=["<video>"], return_tensors="pt")
    assert inputs["pixel_values"].shape == (4, 3, 224, 224)
    assert int((inputs["input_ids"] == processor.image_token_id).sum()) == 4 * 64
    with torch.inference_mode():
        assert torch.isfinite(model(**inputs).logits).all()


def test_byte_tokenizer_round_trips_any_text() -> None:
    tokenizer = byte_tokenizer(["<image>"], attributes={"image_token": "<image>"})
    text = "Grüße, 世界  x\n"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert token_ids(tokenizer, ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>"]) == [256, 257, 258, 259]
    assert tokenizer("<image>")["input_ids"] == [259]


def test_byte_tokenizer_with_a_gap_before_the_special_tokens() -> None:
    tokenizer = byte_tokenizer(["<image>"], first_special_id=92540)
    assert token_ids(tokenizer, ["<|endoftext|>", "<image>"]) == [92540, 92543]
    assert tokenizer("a<image>")["input_ids"][1:] == [92543]


def test_chat_template_without_media() -> None:
    tokenizer = byte_tokenizer([])
    tokenizer.chat_template = chat_template({})
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
