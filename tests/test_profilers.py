"""Profilers against real processors: the token rule for 200 shapes a family; nothing within limits costs more."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from orchestrator.config import MediaConfig
from orchestrator.engine.options import apply_options
from orchestrator.errors import ConfigError, UserError
from orchestrator.modality.base import ModalityProfiler
from orchestrator.modality.generic import GenericProfiler
from orchestrator.registry import Registry
from tests.media_processors import RATE, REAL_SIZE, RealSize, embed_tokens, processed, random_item
from tests.toy import composed

REGISTRY = Registry.discover()
BY_NAME = {family.name: family for family in REAL_SIZE}

_SMALL_QWEN = {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64}}
_TILE = {"height": 28, "width": 28}
_SQUARE = {"max_image_size": {"longest_edge": 56}}
SMALL: dict[str, dict[str, Any]] = {
    "internvl": {"size": _TILE},
    "qwen2_vl": _SMALL_QWEN,
    "qwen2_5_vl": _SMALL_QWEN,
    "qwen3_vl": {
        "images_kwargs": {"size": {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 64}},
        "videos_kwargs": {"size": {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 48}},
    },
    "llava_onevision": {
        "images_kwargs": {
            "size": _TILE,
            "image_grid_pinpoints": [[28 * rows, 28 * columns] for rows in range(1, 5) for columns in range(1, 5)],
        },
        "videos_kwargs": {"size": _TILE},
    },
    "smolvlm": {
        "images_kwargs": {"size": {"longest_edge": 224}, **_SQUARE},
        "videos_kwargs": {"size": {"longest_edge": 56}, **_SQUARE},
    },
    "idefics3": {"size": {"longest_edge": 224}, **_SQUARE},
    "gemma3": {"size": _TILE, "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 30},
    "qwen2_audio": {},
    "qwen2_5_omni_thinker": _SMALL_QWEN,
}
"""Options under which a real processor is quick."""

CASES = [(family.name, modality) for family in REAL_SIZE for modality in family.marks]


@pytest.fixture(scope="module")
def processors() -> dict[str, Any]:
    """Small ones, made when they are asked for."""
    return {}


def small(processors: dict[str, Any], name: str) -> Any:
    if name not in processors:
        processor = BY_NAME[name].make()
        apply_options(processor, SMALL[name])
        if hasattr(processor, "feature_extractor"):
            make: Any = transformers.WhisperFeatureExtractor
            processor.feature_extractor = make(feature_size=16, chunk_length=2)
        processors[name] = processor
    return processors[name]


def profiler(
    name: str, processor: Any, limits: MediaConfig | None = None, max_tokens: int | None = None
) -> ModalityProfiler:
    found: ModalityProfiler = REGISTRY.resolve("profilers", name)(
        processor, SimpleNamespace(model_type=name), limits or composed().mm, max_tokens
    )
    return found


def limited(**changes: Any) -> MediaConfig:
    values = composed().mm.model_dump()
    return MediaConfig.model_validate({**values, **changes})


def shapes(modality: str, count: int, most: int = 250) -> list[tuple[int, ...]]:
    """Seeded shapes, uneven ones among them; none so low that its rows would be taken for channels."""
    drawn = random.Random(modality)
    found: list[tuple[int, ...]] = []
    for _ in range(count):
        width, height = (drawn.choice((drawn.randint(4, 40), drawn.randint(30, most))) for _ in range(2))
        frames = drawn.randint(2, 9)
        found.append(
            {"image": (width, height), "video": (frames, width, height)}.get(modality, (drawn.randint(400, 40000),))
        )
    return found


@pytest.mark.parametrize(("name", "modality"), CASES)
def test_the_rule_is_the_processors_for_200_shapes(processors: dict[str, Any], name: str, modality: str) -> None:
    processor, mark = small(processors, name), BY_NAME[name].marks[modality]
    ours = profiler(name, processor)
    wrong = []
    for number, shape in enumerate(shapes(modality, 200, 120 if modality == "video" else 250)):
        made = processed(processor, modality, mark, random_item(modality, shape, number))
        tokens = embed_tokens(processor, modality, mark, made)
        if ours.tokens(modality, shape) != tokens:
            wrong.append((shape, ours.tokens(modality, shape), tokens))
    assert wrong == []


LIMITS: list[dict[str, Any]] = [
    {},
    {
        "image": {"max_size": [200, 90]},
        "video": {"max_frames": 7, "max_size": [90, 120]},
        "audio": {"max_seconds": 1.5},
    },
    {"image": {"max_size": [20, 300]}, "video": {"max_frames": 5, "max_size": [40, 40]}, "audio": {"max_seconds": 0.3}},
]


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("max_tokens", [1 << 20, 150])
@pytest.mark.parametrize(("name", "modality"), CASES)
def test_nothing_within_the_limits_costs_more(
    processors: dict[str, Any], name: str, modality: str, limits: dict[str, Any], max_tokens: int
) -> None:
    limits = limits or {"video": {"max_frames": 9, "max_size": None}}
    allowed = limited(**limits)
    ours = profiler(name, small(processors, name), allowed, max_tokens)
    spec = ours.costliest(modality)
    assert spec.tokens == ours.tokens(modality, spec.shape)
    for shape in (spec.shape, ours.heaviest(modality).shape, *shapes(modality, 1500, 400)):
        if within(modality, shape, allowed) and (tokens := ours.tokens(modality, shape) or 0) <= max_tokens:
            assert tokens <= (spec.tokens or 0), shape
    assert within(modality, spec.shape, allowed)


def within(modality: str, shape: tuple[int, ...], limits: MediaConfig) -> bool:
    if modality == "audio":
        return limits.audio.max_seconds is None or shape[0] <= limits.audio.max_seconds * RATE
    most = limits.image.max_size if modality == "image" else limits.video.max_size
    frames = limits.video.max_frames if modality == "video" else None
    sides = most is None or (shape[-2] <= most[0] and shape[-1] <= most[1])
    return sides and (frames is None or shape[0] <= frames)


@pytest.mark.parametrize("limits", [{"max_frames": 4, "max_size": [60, 60]}, {"max_frames": None, "max_size": None}])
@pytest.mark.parametrize(("name", "modality"), CASES)
def test_what_is_built_is_of_the_shape(
    processors: dict[str, Any], name: str, modality: str, limits: dict[str, Any]
) -> None:
    processor, mark = small(processors, name), BY_NAME[name].marks[modality]
    ours = profiler(name, processor, limited(video=limits), 3000)
    for spec in (ours.costliest(modality), ours.heaviest(modality)):
        made = processed(processor, modality, mark, as_array(ours.build(spec)))
        assert embed_tokens(processor, modality, mark, made) == spec.tokens


def as_array(item: Any) -> Any:
    import numpy as np

    return np.stack([np.asarray(frame) for frame in item]) if isinstance(item, list) else item


REAL: list[tuple[str, str, tuple[int, ...] | None, int]] = [
    ("internvl", "image", None, 13 * 256),
    ("internvl", "image", (2000, 2000), 10 * 256),
    ("internvl", "video", (128, 448, 448), 128 * 256),
    ("qwen2_5_vl", "image", None, 16384),
    ("qwen2_5_vl", "video", None, 32768),
    ("qwen3_vl", "image", None, 16384),
    # All frames together have 24,576 squares, of which two make a token; rounding leaves half as many again at five
    # frames, and still more for 768 frames that are 200 times as wide as they are high.
    ("qwen3_vl", "video", (4, 2048, 3072), 12288),
    ("qwen3_vl", "video", (5, 2048, 3072), 18432),
    ("qwen3_vl", "video", None, 30720),
    ("llava_onevision", "image", (2304, 2304), 7371),
    ("smolvlm", "image", None, 17 * 169),
    ("idefics3", "image", (10, 10), 17 * 169),
    ("gemma3", "image", None, 256),
    ("qwen2_audio", "audio", None, 750),
    ("qwen2_5_omni_thinker", "audio", None, 7500),
]


@pytest.mark.parametrize(("name", "modality", "shape", "tokens"), REAL)
def test_the_costs_of_real_models(name: str, modality: str, shape: tuple[int, ...] | None, tokens: int) -> None:
    ours = profiler(name, BY_NAME[name].make(), max_tokens=32768)
    assert (ours.costliest(modality).tokens if shape is None else ours.tokens(modality, shape)) == tokens


def test_twelve_images_at_a_cap_of_602112_pixels() -> None:
    processor = BY_NAME["qwen2_vl"].make()
    apply_options(processor, {"size": {"shortest_edge": 3136, "longest_edge": 602112}})
    spec = profiler("qwen2_vl", processor).costliest("image")
    assert 12 * (spec.tokens or 0) == 9216
    made = processed(processor, "image", "<|image_pad|>", profiler("qwen2_vl", processor).build(spec))
    assert embed_tokens(processor, "image", "<|image_pad|>", made) == 768
    given = limited(processor_kwargs={"max_pixels": 602112})
    assert profiler("qwen2_vl", BY_NAME["qwen2_vl"].make(), given).costliest("image").tokens == 768


def test_an_option_that_the_processor_does_not_know_is_named() -> None:
    with pytest.raises(ConfigError, match=r"mm\.processor_kwargs\.max_pixel: .* did you mean max_pixels\?"):
        apply_options(BY_NAME["qwen2_vl"].make(), {"max_pixel": 602112})


def test_the_most_tokens_and_the_most_bytes_are_two_images_of_llava_onevision() -> None:
    processor = BY_NAME["llava_onevision"].make()
    ours = profiler("llava_onevision", processor)
    most_tokens, most_bytes = ours.costliest("image"), ours.heaviest("image")
    assert (most_tokens.tokens or 0) > (most_bytes.tokens or 0)
    tiles = [
        len(processed(processor, "image", "<image>", ours.build(spec))["pixel_values"][0])
        for spec in (most_tokens, most_bytes)
    ]
    assert tiles[1] == 37 > tiles[0]


def test_frames_are_limited_by_what_a_sequence_has_room_for() -> None:
    ours = profiler("smolvlm", BY_NAME["smolvlm"].make(), max_tokens=1000)
    assert ours.costliest("video").shape[0] == 1000 // 169
    unlimited = profiler("smolvlm", BY_NAME["smolvlm"].make())
    with pytest.raises(UserError, match=r"how long a video may be; give mm\.video\.max_frames"):
        unlimited.costliest("video")


def test_audio_is_as_long_as_the_window_and_no_longer() -> None:
    long = limited(audio={"max_seconds": 900.0})
    assert profiler("qwen2_audio", BY_NAME["qwen2_audio"].make(), long).costliest("audio").shape == (30 * RATE,)
    omni = BY_NAME["qwen2_5_omni_thinker"].make()
    assert profiler("qwen2_5_omni_thinker", omni, long).costliest("audio").shape == (300 * RATE,)
    apply_options(omni, {"audio_kwargs": {"truncation": False}})
    assert profiler("qwen2_5_omni_thinker", omni, long).costliest("audio").shape == (900 * RATE,)


@pytest.mark.parametrize("family", REAL_SIZE, ids=lambda family: family.name)
def test_the_generic_profiler_comes_near_the_families_own(family: RealSize) -> None:
    """It does not know where a family rounds, so it is short by up to a tenth; most often by nothing."""
    processor = family.make()
    limits = limited(video={"max_frames": 16, "max_size": None})
    generic = GenericProfiler(processor, SimpleNamespace(), limits, 32768)
    own = profiler(family.name, processor, limits, 32768)
    for modality in family.marks:
        best = own.costliest(modality).tokens or 0
        assert (own.tokens(modality, generic.costliest(modality).shape) or 0) >= best * 0.9
