"""What of videos and audio is refused, each with the numbers, while the other requests are served."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
import transformers

from orchestrator.engine.base import Media, Request
from orchestrator.engine.feed import worker_count
from orchestrator.engine.media import Ears
from orchestrator.engine.placeholders import placeholders, refuse_without
from orchestrator.engine.transformers import TransformersEngine
from orchestrator.errors import CheckpointError
from orchestrator.events import SilentEvents
from orchestrator.modality.base import DummyBatch
from tests.tiny_media import OMNI, asking, frames, medium, qwen2_5_omni, qwen2_audio, sound
from tests.tiny_models import PLACEHOLDER, image, internvl_folder, make_engine, request

LIMITS: dict[str, Any] = {
    "limit_per_prompt": {"image": 2, "video": 1, "audio": 1},
    "image": {"max_size": [100, 90]},
    "video": {"max_frames": 6, "max_size": [80, 60]},
    "audio": {"max_seconds": 1.5},
}


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("omni")
    qwen2_5_omni(folder)
    return folder


def one(modality: str, data: Any) -> Request:
    return asking(OMNI[modality], Media(modality, data), max_tokens=2)


def opened(picture: PIL.Image.Image, keep: float = 1.0) -> PIL.Image.Image:
    """A picture as a file has it, not decoded; of which only a part is there."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return PIL.Image.open(io.BytesIO(file.getvalue()[: int(keep * file.tell())]))


def damaged() -> PIL.Image.Image:
    return opened(image(1), 0.5)


WRONG: list[tuple[Request, str]] = [
    (one("video", frames(1, 7)), "the video has 7 frames; mm.video.max_frames is 6"),
    (one("video", frames(1, 2, width=81)), "the video has 81 x 56 pixels; mm.video.max_size is 80 x 60"),
    (one("video", frames(1, 2, height=61)), "the video has 70 x 61 pixels; mm.video.max_size is 80 x 60"),
    (one("image", image(1, 101, 56)), "the image has 101 x 56 pixels; mm.image.max_size is 100 x 90"),
    (one("audio", sound(1, 1.6)), "the audio lasts 1.6 s; mm.audio.max_seconds is 1.5"),
    (one("audio", (sound(1), 44100)), "the audio has 44100 samples a second, and the model takes 16000: resample it"),
    (
        one("audio", sound(1).reshape(2, -1)),
        "audio must be one channel of floating-point samples, not float32 of shape",
    ),
    (one("audio", np.zeros(99, dtype=np.int16)), "audio must be one channel of floating-point samples, not int16"),
    (one("audio", np.zeros(0, dtype=np.float32)), "audio must be one channel"),
    (one("audio", (16000, sound(1))), "audio must be one channel of floating-point samples"),
    (one("audio", (sound(1), np.int64(8000))), "the audio has 8000 samples a second, and the model takes 16000"),
    (one("video", []), "the video has no frames"),
    (one("video", frames(1, 0)), "the video has no frames"),
    (one("video", "a path"), "a frame of a video must be a PIL image, not a str"),
    (one("video", 3), "a video must be PIL images or a uint8 array (frames, height, width, 3), not int"),
    (one("video", frames(1) / 255.0), "not float64 of shape (4, 56, 70, 3)"),
    (one("video", [image(1), damaged()]), "the picture cannot be read: image file is truncated"),
    (one("image", damaged()), "the picture cannot be read: image file is truncated"),
    (one("image", PIL.Image.new("RGB", (5, 0))), "the image has 5 x 0 pixels"),
    (one("video", [image(1), image(2, 56, 57)]), "the frames of a video must have one size; there are 56 x 56 and"),
    (
        asking(OMNI["video"] * 2, medium("video", 1), medium("video", 2)),
        "the request carries 2 video items; mm.limit_per_prompt.video=1",
    ),
    (asking(OMNI["audio"], medium("video", 1)), "the prompt has placeholders for 1 audio, and the request carries 1 v"),
]


def test_what_is_over_a_limit_or_of_no_known_form_ends_alone(omni: Path) -> None:
    engine = make_engine(omni, mm=LIMITS, encoder_tokens=512)
    right = [one("video", frames(3, 6, 80, 60)), one("audio", (sound(3, 1.5), 16000)), one("image", image(3, 100, 90))]
    outputs = engine.generate([*right, *(request for request, _ in WRONG)])
    assert [output.error for output in outputs[: len(right)]] == [None] * len(right)
    for output, (_, said) in zip(outputs[len(right) :], WRONG, strict=True):
        assert output.finish_reason == "error" and said in (output.error or ""), output.error
    assert engine.held()["requests"] == 0


def test_audio_that_the_processor_would_cut_off_is_refused(omni: Path) -> None:
    engine = make_engine(omni, mm={"limit_per_prompt": {"image": 0, "video": 0, "audio": 1}}, encoder_tokens=512)
    fits, cut = engine.generate([one("audio", sound(1, 3.0)), one("audio", sound(1, 3.5))])
    assert fits.error is None
    assert cut.error == "the audio lasts 3.5 s; the model's processor would cut it off at 3 s"


def test_a_processor_that_does_not_cut_audio_off_keeps_everything(omni: Path) -> None:
    kept = {"audio_kwargs": {"truncation": False}}
    engine = make_engine(omni, load=False, mm={"processor_kwargs": kept})
    engine.load(SilentEvents())
    assert Ears.of(engine.processor) == Ears(16000, None)


def test_an_item_larger_than_the_profiled_one_ends_alone(omni: Path) -> None:
    """Whatever the budget says, memory was reserved for the item that was profiled."""
    engine = make_engine(omni, mm=LIMITS, encoder_tokens=512)
    small = engine.media_inputs(Media("audio", sound(1, 0.5)))
    engine.encode_dummy(DummyBatch({"audio": small}), {"audio": 1})
    fits, large = engine.generate([one("audio", sound(2, 0.5)), one("audio", sound(2, 1.0))])
    assert fits.error is None
    assert large.error == "one audio has 25 encoder tokens, and memory was reserved for 12 at most"


def test_an_opened_picture_that_many_requests_share_is_decoded_once(tmp_path: Path) -> None:
    engine = make_engine(internvl_folder(tmp_path), encoder_tokens=512)
    shared = opened(image(1, 1200, 1200))
    asked = [request(PLACEHOLDER, shared, name=str(n), chat=False, max_tokens=2) for n in range(8)]
    outputs = engine.generate(asked)
    assert {output.error for output in outputs} == {None}
    assert len({tuple(output.token_ids) for output in outputs}) == 1


def test_pictures_of_equal_bytes_and_other_colours_are_told_apart(tmp_path: Path) -> None:
    engine = make_engine(internvl_folder(tmp_path))
    pictures = [PIL.Image.new("P", (56, 56)) for _ in range(3)]
    for picture, colour in zip(pictures, ([255, 0, 0], [0, 0, 255], [255, 0, 0]), strict=True):
        picture.putpalette(colour * 256)
    red, blue, again = (engine.media_inputs(Media("image", picture)) for picture in pictures)
    plain = engine.media_inputs(Media("image", pictures[1].convert("RGB")))
    assert red.content_hash == again.content_hash != blue.content_hash
    assert torch.equal(blue.tensors["pixel_values"], plain.tensors["pixel_values"])


@pytest.mark.parametrize("seconds", [0.05, 0.5])
def test_audio_of_two_lengths_has_the_tokens_of_its_length(omni: Path, seconds: float) -> None:
    engine = make_engine(omni, mm=LIMITS)
    item = engine.media_inputs(Media("audio", sound(1, seconds)))
    frames_of_mel = int(seconds * 100)
    assert item.num_embeds == ((frames_of_mel - 1) // 2 + 1 - 2) // 2 + 1


def test_equal_media_are_known_again_and_other_rates_or_shapes_are_not(omni: Path) -> None:
    engine = make_engine(omni, mm=LIMITS)
    hashes = [
        engine.media_inputs(Media(kind, data)).content_hash
        for kind, data in [
            ("audio", sound(1)),
            ("audio", (sound(1), 16000)),
            ("audio", sound(2)),
            ("video", frames(1, 4, 60, 40)),
            ("video", frames(1, 4, 60, 40).reshape(4, 60, 40, 3)),
        ]
    ]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 4


def test_a_model_made_for_audio_that_cannot_hear_is_refused(omni: Path) -> None:
    """Only where audio is asked for."""
    processor: Any = transformers.AutoProcessor.from_pretrained(omni)  # type: ignore[no-untyped-call]
    config = transformers.AutoConfig.from_pretrained(omni)
    model_class = transformers.Qwen2_5OmniThinkerForConditionalGeneration
    assert set(placeholders(config, processor, model_class).texts) == {"image", "video", "audio"}
    del processor.feature_extractor
    assert set(placeholders(config, processor, model_class).texts) == {"image", "video"}
    with pytest.raises(
        CheckpointError, match=r"cannot be given audio: .* has no feature_extractor; mm.*audio=0 starts"
    ):
        refuse_without("audio", config, processor, model_class)
    refuse_without("image", config, processor, model_class)


@pytest.mark.parametrize("write", [qwen2_audio, qwen2_5_omni])
def test_a_chat_with_audio_has_the_ids_of_the_processor(write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path)
    engine = make_engine(tmp_path, mm=LIMITS, encoder_tokens=512)
    asked = asking("what is it?", Media("audio", sound(1)), chat=True, max_tokens=2)
    (output,) = engine.generate([asked])
    content = [{"type": "audio"}, {"type": "text", "text": asked.text}]
    text = engine.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    batch = engine.processor(text=[text], audio=[sound(1)], audio_kwargs={"sampling_rate": 16000})
    assert output.error is None
    assert output.prompt_token_ids == list(batch["input_ids"][0])
    assert engine.oracle_logprobs(asked, output)[0] == pytest.approx(output.logprobs, abs=1e-4)


def encoded(engine: TransformersEngine, micro_batch: int, most_tokens: dict[str, int] | None = None) -> torch.Tensor:
    """Rows of three pictures of one size and two videos, encoded in one step."""
    items = [engine.media_inputs(medium("image", seed)) for seed in range(3)]
    items += [engine.media_inputs(medium("video", seed)) for seed in range(2)]
    cache = engine._need_encoder()
    cache.index.clear()
    for item in items:
        cache.index.add(item.content_hash, item.num_embeds)
    engine.set_micro_batch({"image": micro_batch, "video": micro_batch}, most_tokens)
    engine._need().runner.encode(items, cache)
    return torch.cat([cache.slab[list(cache.index.rows(item.content_hash))] for item in items])


@pytest.mark.parametrize("family", ["internvl", "omni"])
def test_pieces_give_what_the_whole_gives(family: str, omni: Path, tmp_path: Path) -> None:
    folder = omni if family == "omni" else internvl_folder(tmp_path)
    engine = make_engine(folder, encoder_tokens=1024, mm={"limit_per_prompt": {"image": 3, "video": 3, "audio": 0}})
    whole = encoded(engine, 8)
    assert whole.abs().max() > 0
    for pieces in (1, 2):
        torch.testing.assert_close(encoded(engine, pieces), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("most_tokens", [1, 4, 9, 1000])
def test_tiles_and_frames_in_several_calls_give_what_one_call_gives(tmp_path: Path, most_tokens: int) -> None:
    engine = make_engine(internvl_folder(tmp_path), encoder_tokens=1024)
    whole, calls = encoded(engine, 1), []
    tower = engine._need().model.model.vision_tower
    tower.register_forward_pre_hook(lambda _, args, given: calls.append(len(given["pixel_values"])), with_kwargs=True)
    cut = encoded(engine, 1, {"image": most_tokens, "video": most_tokens})
    torch.testing.assert_close(cut, whole, atol=1e-5, rtol=1e-5)
    assert max(calls) == {1: 1, 4: 1, 9: 2}.get(most_tokens, 7)


def test_what_an_encoder_puts_together_is_not_cut(omni: Path, tmp_path: Path) -> None:
    """Patches with a grid, frames that are pooled, samples; and an image of one tile."""
    engine = make_engine(omni, mm=LIMITS)
    items = [engine.media_inputs(medium(kind, 1)) for kind in ("image", "video", "audio")]
    assert not any(engine.divisible(item) for item in items)
    tiled = make_engine(internvl_folder(tmp_path))
    assert not tiled.divisible(tiled.media_inputs(Media("image", image(1))))
    assert tiled.divisible(tiled.media_inputs(medium("video", 1)))


def test_dummies_of_several_steps_do_not_push_each_other_out(tmp_path: Path) -> None:
    engine = make_engine(
        internvl_folder(tmp_path), encoder_tokens=24, mm={"limit_per_prompt": {"image": 3, "video": 1, "audio": 0}}
    )
    batch = DummyBatch(
        {
            "image": engine.media_inputs(Media("image", image(1))),
            "video": engine.media_inputs(Media("video", frames(1, 2))),
        }
    )
    for items in ({"image": 2}, {"video": 3}, {"image": 4}, {"image": 2, "video": 2}):
        engine.encode_dummy(batch, items)
        assert len(engine._need_encoder().index) == sum(items.values())


def test_a_thousand_requests_are_not_all_processed_at_once(tmp_path: Path) -> None:
    engine = make_engine(internvl_folder(tmp_path), scheduler={"max_num_seqs": 2, "max_num_batched_tokens": 64})
    prompts, made = engine._need().prompts, []
    process = prompts.processed

    def counting(media: Media, key: str) -> Any:
        made.append(len(engine.steps))
        return process(media, key)

    prompts.processed = counting  # type: ignore[method-assign]
    outputs = engine.generate(
        [request(PLACEHOLDER, image(n), name=str(n), chat=False, max_tokens=2) for n in range(30)]
    )
    assert [output.request_id for output in outputs] == [str(n) for n in range(30)]
    assert not any(output.error for output in outputs)
    # The first to wait, and what the threads make ahead of them; from then on as many as were admitted.
    assert sum(step == 0 for step in made) <= 2 + 2 * worker_count() and made[-1] > 5
