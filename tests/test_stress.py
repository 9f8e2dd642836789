"""The load of a stress run: every block is taken, what does not fit is left out, a conversation grows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator import start
from orchestrator.engine.base import Media, Request
from orchestrator.memory.sampler import PeakSampler
from orchestrator.stages.stress import fitted, largest_media
from tests.toy import composed


def counter(per_media: int, per_word: int = 1, wrapper: int = 7) -> Callable[[Request], int]:
    return lambda request: wrapper + len(request.media) * per_media + per_word * (len(request.text) // 2)


@pytest.mark.parametrize("per_word", [1, 2])
@pytest.mark.parametrize("room", [7, 8, 100, 333])
def test_a_request_comes_as_near_to_its_room_as_words_allow(room: int, per_word: int) -> None:
    count = counter(50, per_word)
    request = fitted("a", (), room, 16, count)
    assert request is not None
    assert room - per_word < count(request) <= room
    assert (request.max_tokens, request.ignore_eos) == (16, True)


def test_media_that_do_not_fit_are_not_asked_for() -> None:
    image = Media("image", None)
    assert fitted("a", (image,), 56, 16, counter(50)) is None
    assert fitted("a", (image,), 57, 16, counter(50)) is not None


def test_the_largest_image_has_its_shape_and_no_two_regions_alike() -> None:
    (media,) = largest_media({"image": (300, 200), "video": (2, 8, 8)}, composed())
    picture = media.data
    assert (picture.size, picture.mode) == ((300, 200), "RGB")
    assert len(set(picture.crop((0, 0, 20, 20)).tobytes())) > 20


def test_a_sampler_sees_a_peak_between_two_readings() -> None:
    readings = iter([1, 5, 2])
    with PeakSampler(lambda: next(readings, 2), interval_s=0.001) as sampler:
        while sampler.readings < 4:
            pass
    assert sampler.peak == 5


def test_a_stress_run_takes_every_block_and_loses_nothing(tmp_path: Path) -> None:
    overrides = [
        "device=cpu",
        "kv.bytes=auto",
        "scheduler.max_model_len=1024",
        "scheduler.max_num_seqs=4",
        "scheduler.max_num_batched_tokens=1024",
        "stages.verify.mode=stress",
        "stages.verify.max_tokens=4",
        f"run.dir={tmp_path}",
    ]
    with start(overrides) as started:
        blocks = started.engine.most_blocks_used
        verify = started.record.stages[-1].metrics
    assert started.record.kv_cache is not None
    assert blocks == verify["stress"]["blocks_used"] == started.record.kv_cache.num_gpu_blocks == 4 * 64
    assert verify["stress"]["media"] >= 1
    assert verify["stress"]["turns"] == 20
    assert verify["readings"] > 10
    rehearsed = next(stage for stage in started.record.stages if stage.slot == "allocate_kv").metrics
    assert rehearsed["rehearsed_bytes"] > 0
