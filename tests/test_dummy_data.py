"""The stage dummy_data: one processor call a modality, none when an earlier start of any process has made the item."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from orchestrator import DUMMY, ENGINE, DummyBatch, ItemSpec, Media, MediaInputs, ModalityProfiler
from orchestrator.cache import Cache
from orchestrator.device.fake import FakeDevice
from orchestrator.engine.options import apply_options
from orchestrator.errors import StageError
from orchestrator.registry import Registry
from orchestrator.stage import Context
from orchestrator.stages.dummy_data import DummyData, DummyDataConfig
from orchestrator.units import MiB
from tests.media_processors import REAL_SIZE, embed_tokens, processed
from tests.test_readme import blocks
from tests.toy import ToyEngine, context

FAMILIES = {family.name: family for family in REAL_SIZE}
OPTIONS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 256}},
    "llava_onevision": {"images_kwargs": {"image_grid_pinpoints": [[384, 384], [384, 768], [768, 384]]}},
}
BOTH = ("mm.limit_per_prompt.video=1", "mm.video.max_frames=4", "scheduler.max_model_len=4096")


@dataclass
class Seeing(ToyEngine):
    """Media through a real processor, everything else as a toy."""

    family: str = "qwen2_5_vl"
    processed: list[str] = field(default_factory=list)
    max_model_len: int = 4096

    def __post_init__(self) -> None:
        self.processor = FAMILIES[self.family].make()
        apply_options(self.processor, OPTIONS.get(self.family, {}))
        self.model_config = SimpleNamespace(model_type=self.family)
        self.processor_identity = self.family

    def modalities(self) -> tuple[str, ...]:
        return tuple(FAMILIES[self.family].marks)

    def media_inputs(self, media: Media) -> MediaInputs:
        self.processed.append(media.modality)
        mark = FAMILIES[self.family].marks[media.modality]
        made = processed(self.processor, media.modality, mark, media.data)
        tokens = embed_tokens(self.processor, media.modality, mark, made)
        tensors = {name: value for name, value in made.items() if "pixel" in name or "grid" in name}
        return MediaInputs(media.modality, [7] * tokens, [True] * tokens, tensors, media.modality)


def run(where: Path, *overrides: str, engine: Seeing | None = None) -> tuple[Context, Seeing]:
    device = FakeDevice(1 << 20)
    ctx = context(device, where, *overrides)
    ctx.cache = Cache(where / "cache", max_bytes=64 * MiB, warn=ctx.events.warning)
    ctx.resolver = Registry.discover().resolve
    engine = engine or Seeing(device)
    ctx.state.put(ENGINE, engine)
    DummyData(DummyDataConfig(use="dummy_data")).run(ctx)
    return ctx, engine


def outcomes(ctx: Context) -> dict[str, str]:
    return {modality: facts["cache"] for modality, facts in ctx.metrics["modalities"].items()}


def batch(ctx: Context) -> DummyBatch:
    return ctx.state.get(DUMMY)


def test_one_processor_call_a_modality_and_none_the_next_time(tmp_path: Path) -> None:
    ctx, engine = run(tmp_path, *BOTH)
    assert engine.processed == ["image", "video"]
    assert ctx.metrics["processor_calls"] == 2
    assert batch(ctx).tokens_per_item == {"image": 256, "video": 512}
    assert batch(ctx).per_prompt == {"image": 1, "video": 1}

    again, engine = run(tmp_path, *BOTH)
    assert (engine.processed, again.metrics["processor_calls"]) == ([], 0)
    assert outcomes(again) == {"image": "hit", "video": "hit"}
    for modality, item in batch(ctx).items.items():
        other = batch(again).items[modality]
        assert (item.token_ids, item.embed_mask, item.shape) == (other.token_ids, other.embed_mask, other.shape)
        assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in item.tensors.items())


@pytest.mark.parametrize(("overrides", "calls"), [((), ["image"]), (("mm.limit_per_prompt.image=0",), [])])
def test_what_is_off_is_not_processed(tmp_path: Path, overrides: tuple[str, ...], calls: list[str]) -> None:
    ctx, engine = run(tmp_path, *overrides)
    assert engine.processed == calls
    assert list(batch(ctx).items) == calls


@pytest.mark.parametrize(
    "change",
    [
        ("mm.limit_per_prompt.image=7",),
        ("mm.audio.max_seconds=3.0",),
        ("scheduler.max_num_batched_tokens=77",),
        ("gpu.util=0.5",),
        ("mm.image.max_size=[6000,6000]",),
    ],
    ids=lambda change: change[0],
)
def test_what_does_not_change_the_item_is_a_hit(tmp_path: Path, change: tuple[str, ...]) -> None:
    run(tmp_path, *BOTH)
    ctx, engine = run(tmp_path, *BOTH, *change)
    assert (engine.processed, outcomes(ctx)) == ([], {"image": "hit", "video": "hit"})


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        (("mm.image.max_size=[56,56]",), ["image"]),
        (("mm.video.max_frames=2",), ["video"]),
        (("mm.video.max_size=[56,56]",), ["video"]),
    ],
    ids=lambda change: change[0],
)
def test_a_limit_concerns_its_own_modality(tmp_path: Path, change: tuple[str, ...], missed: list[str]) -> None:
    run(tmp_path, *BOTH)
    assert run(tmp_path, *BOTH, *change)[1].processed == missed


@pytest.mark.parametrize(
    "change",
    [
        {"processor_identity": "other files"},
        {"encoder_dtype": "bfloat16"},
        {"model_config": SimpleNamespace(model_type="qwen2_vl")},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_model_processor_or_type_of_elements_is_a_miss(tmp_path: Path, change: dict[str, Any]) -> None:
    run(tmp_path, *BOTH)
    engine = Seeing(FakeDevice(1 << 20))
    for name, value in change.items():
        setattr(engine, name, value)
    assert run(tmp_path, *BOTH, engine=engine)[1].processed == ["image", "video"]


def test_pixels_are_kept_as_the_encoder_takes_them(tmp_path: Path) -> None:
    engine = Seeing(FakeDevice(1 << 20), encoder_dtype="bfloat16")
    ctx, _ = run(tmp_path, engine=engine)
    item = batch(ctx).items["image"]
    assert {name: tensor.dtype for name, tensor in item.tensors.items()} == {
        "pixel_values": torch.bfloat16,
        "image_grid_thw": torch.int64,
    }
    assert ctx.metrics["modalities"]["image"]["bytes"] == item.num_bytes
    plain, _ = run(tmp_path)
    wanted = batch(plain).items["image"].tensors["pixel_values"].to(torch.bfloat16)
    assert torch.equal(item.tensors["pixel_values"], wanted)


def test_the_item_is_the_heaviest_and_the_budget_that_of_the_most_tokens(tmp_path: Path) -> None:
    engine = Seeing(FakeDevice(1 << 20), family="llava_onevision")
    profiler = Registry.discover().resolve("profilers", "llava_onevision")
    ctx, _ = run(tmp_path, engine=engine)
    found = profiler(engine.processor, engine.model_config, ctx.config.mm, engine.max_model_len)
    assert engine.processed == ["image"]
    assert batch(ctx).items["image"].shape == found.heaviest("image").shape
    assert batch(ctx).tokens_per_item["image"] == found.costliest("image").tokens


def test_without_a_cache_everything_is_made_each_time(tmp_path: Path) -> None:
    for _ in range(2):
        ctx = context(FakeDevice(1 << 20), tmp_path)
        ctx.cache = Cache(tmp_path / "off", max_bytes=MiB, enabled=False, warn=ctx.events.warning)
        ctx.resolver = Registry.discover().resolve
        engine = Seeing(FakeDevice(1 << 20))
        ctx.state.put(ENGINE, engine)
        DummyData(DummyDataConfig(use="dummy_data")).run(ctx)
        assert (engine.processed, outcomes(ctx)) == (["image"], {"image": "off"})
    assert not (tmp_path / "off").exists()


class Miscounting(ModalityProfiler):
    modalities: ClassVar[tuple[str, ...]] = ("image",)

    def tokens(self, modality: str, shape: tuple[int, ...]) -> int:
        return 99

    def costliest(self, modality: str) -> ItemSpec:
        return ItemSpec("image", (56, 56), 99)

    def build(self, spec: ItemSpec) -> Any:
        from PIL import Image

        return Image.new("RGB", (56, 56))


def test_a_profiler_that_miscounts_fails_the_start_and_keeps_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(StageError, match=r"counts 99 tokens for image \(56, 56\), .* makes 4 of it"):
            run(tmp_path, "model.profiler=tests.test_dummy_data:Miscounting")


@dataclass
class Thermal(ToyEngine):
    """Takes a modality that only a plugin knows."""

    max_model_len: int = 300

    def modalities(self) -> tuple[str, ...]:
        return ("thermal",)

    def media_inputs(self, media: Media) -> MediaInputs:
        width, height = media.data.shape
        tokens = 1 + (width // 16) * (height // 16)
        frame = torch.from_numpy(media.data)
        return MediaInputs("thermal", [5] * tokens, [True] * tokens, {"readings": frame}, "hash")


def test_the_profiler_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = next(block for block in blocks("python") if "ThermalProfiler" in block)
    assert len(source.splitlines()) <= 45
    module = tmp_path / "thermal_of_the_readme.py"
    module.write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))

    def started() -> tuple[str, DummyBatch]:
        device = FakeDevice(1 << 20)
        ctx = context(device, tmp_path, "model.profiler=thermal_of_the_readme:ThermalProfiler")
        ctx.resolver = Registry.discover().resolve
        engine = Thermal(device, processor=SimpleNamespace(max_side=640, max_squares=1024))
        ctx.state.put(ENGINE, engine)
        DummyData(DummyDataConfig(use="dummy_data")).run(ctx)
        return outcomes(ctx)["thermal"], batch(ctx)

    how, made = started()
    assert (how, made.per_prompt, made.tokens_per_item) == ("miss", {"thermal": 4}, {"thermal": 1 + 17 * 17})
    assert made.items["thermal"].shape == (272, 272)
    assert started()[0] == "hit"
    module.write_text(f"{source}# A profiler that was edited may find another item.\n")
    assert started()[0] == "miss"
