"""The encoder's profile: how many items a call takes, whole steps of each modality, and the worst mix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from orchestrator.artifacts import DUMMY, ENGINE, PROFILE
from orchestrator.device.fake import FakeDevice
from orchestrator.errors import DeviceOutOfMemoryError
from orchestrator.modality.base import DummyBatch, MediaInputs
from orchestrator.stage import Context
from orchestrator.stages.encoder_profile import worst_mix
from orchestrator.stages.profile_run import ProfileRun
from tests.toy import ToyEngine, context

LIMITS = (
    "scheduler.max_num_seqs=2",
    "scheduler.max_num_batched_tokens=160",
    "mm.limit_per_prompt.image=8",
    "mm.limit_per_prompt.audio=8",
)


@dataclass
class EncodingEngine(ToyEngine):
    """Its encoder takes so many bytes an item of a call; calls run one after the other."""

    item_bytes: Mapping[str, int] = field(default_factory=lambda: {"image": 10, "audio": 3})
    micro_batch: dict[str, int] = field(default_factory=dict)
    steps: list[dict[str, int]] = field(default_factory=list)
    can_be_cut: bool = False
    piece_tokens: dict[str, int] = field(default_factory=dict)

    def set_micro_batch(self, items: Mapping[str, int], most_tokens: Mapping[str, int] | None = None) -> None:
        self.micro_batch.update(items)
        self.piece_tokens = dict(most_tokens or {})

    def divisible(self, item: MediaInputs) -> bool:
        return self.can_be_cut

    def encode_dummy(self, batch: DummyBatch, items: dict[str, int]) -> None:
        self.steps.append(dict(items))
        for modality, count in items.items():
            tokens = batch.items[modality].num_embeds
            share = min(1.0, self.piece_tokens.get(modality, tokens) / tokens)
            for start in range(0, count, self.micro_batch.get(modality, 1)):
                together = min(count - start, self.micro_batch.get(modality, 1))
                self.device.use(round(self.item_bytes[modality] * together * share))


def item(modality: str, tokens: int) -> MediaInputs:
    return MediaInputs(modality, [9] * tokens, [True] * tokens, {}, modality)


def profiled(
    folder: Path, tokens: Mapping[str, int], *overrides: str, total: int = 10_000, **engine: object
) -> tuple[Context, EncodingEngine]:
    device = FakeDevice(total)
    made = EncodingEngine(device, **engine)  # type: ignore[arg-type]
    ctx = context(device, folder, *LIMITS, *overrides)
    ctx.state.put(ENGINE, made)
    ctx.state.put(DUMMY, DummyBatch({modality: item(modality, count) for modality, count in tokens.items()}))
    ProfileRun(ProfileRun.Config(use="profile_run")).run(ctx)
    return ctx, made


@pytest.mark.parametrize(("step_peak", "chosen"), [(5, 1), (19, 1), (20, 2), (45, 4), (80, 8), (1000, 16)])
def test_a_call_grows_as_far_as_the_language_model_needs_memory(tmp_path: Path, step_peak: int, chosen: int) -> None:
    ctx, engine = profiled(tmp_path, {"image": 10}, step_peak=step_peak)
    assert engine.micro_batch == {"image": chosen} == ctx.metrics["micro_batch"]
    profile = ctx.state.get(PROFILE)
    assert profile.micro_batch == {"image": chosen}
    assert profile.peaks["encoder.image"] == 10 * chosen
    assert profile.peak_activation == max(step_peak, 10)
    assert ctx.metrics["encoder_items"] == {"encoder.image": {"image": 16}}


def test_a_step_is_measured_last_and_whole(tmp_path: Path) -> None:
    _, engine = profiled(tmp_path, {"image": 10}, step_peak=45)
    assert engine.steps == [{"image": 1}, {"image": 2}, {"image": 4}, {"image": 16}]


def test_nothing_is_tried_beside_the_largest_single_item(tmp_path: Path) -> None:
    """Two of the item that sets the limit cannot stay within it; smaller items of another modality can."""
    ctx, engine = profiled(tmp_path, {"image": 10, "audio": 5}, step_peak=5)
    assert engine.micro_batch == {"image": 1, "audio": 2}
    assert ctx.metrics["micro_batch_trials_bytes"] == {"image": {"1": 10}, "audio": {"1": 3, "2": 6, "4": 12}}


@pytest.mark.parametrize(("step_peak", "tokens"), [(100, 0), (64, 0), (63, 32), (31, 16), (20, 16), (15, 8), (3, 2)])
def test_one_item_that_can_be_cut_is_cut_as_far_as_the_language_model_needs(
    tmp_path: Path, step_peak: int, tokens: int
) -> None:
    ctx, engine = profiled(
        tmp_path, {"video": 64}, step_peak=step_peak, item_bytes={"video": 64}, can_be_cut=True, max_model_len=2
    )
    assert engine.piece_tokens == ctx.metrics["piece_tokens"] == ({"video": tokens} if tokens else {})
    assert ctx.state.get(PROFILE).peaks["encoder.video"] == (tokens or 64)


def test_a_given_number_is_not_searched_for(tmp_path: Path) -> None:
    ctx, engine = profiled(tmp_path, {"image": 10}, "encoder.micro_batch=3", step_peak=5)
    assert engine.steps == [{"image": 16}]
    assert (engine.micro_batch, ctx.state.get(PROFILE).peak_activation) == ({"image": 3}, 30)


def test_a_call_that_the_device_refuses_ends_the_search(tmp_path: Path) -> None:
    ctx, engine = profiled(tmp_path, {"image": 10}, total=185, step_peak=20, item_bytes={"image": 14})
    assert engine.micro_batch == {"image": 1}
    assert ctx.metrics["micro_batch_trials_bytes"] == {"image": {"1": 14, "2": None}}


def test_one_item_that_the_device_refuses_fails_the_stage(tmp_path: Path) -> None:
    with pytest.raises(DeviceOutOfMemoryError):
        profiled(tmp_path, {"image": 10}, total=210, step_peak=5, item_bytes={"image": 51})


def test_several_modalities_are_also_profiled_together(tmp_path: Path) -> None:
    ctx, engine = profiled(tmp_path, {"image": 30, "audio": 5}, step_peak=20)
    assert list(ctx.state.get(PROFILE).peaks)[-3:] == ["encoder.audio", "encoder.image", "encoder.mixed"]
    mixed = ctx.metrics["encoder_items"]["encoder.mixed"]
    assert engine.steps[-1] == mixed == {"image": 4, "audio": 8}
    assert 30 * mixed["image"] + 5 * mixed["audio"] <= 160


def test_text_only_has_no_encoder_part(tmp_path: Path) -> None:
    ctx, engine = profiled(tmp_path, {})
    assert engine.steps == []
    assert set(ctx.state.get(PROFILE).peaks) == {"language_model", "logits"}


def test_the_heaviest_item_may_have_fewer_tokens_than_the_largest(tmp_path: Path) -> None:
    device = FakeDevice(10_000)
    engine = EncodingEngine(device, step_peak=1)
    ctx = context(device, tmp_path, *LIMITS)
    ctx.state.put(ENGINE, engine)
    ctx.state.put(DUMMY, DummyBatch({"image": item("image", 20)}, most_tokens={"image": 80}))
    ProfileRun(ProfileRun.Config(use="profile_run")).run(ctx)
    assert ctx.metrics["items_per_step"] == {"image": 2}
    assert engine.steps[-1] == {"image": 8}


@pytest.mark.parametrize(
    ("tokens", "micro_batch", "most", "peaks", "budget", "mix"),
    [
        # One call of each, then more of the costliest.
        ((10, 5), (2, 4), (9, 9), (7, 3), 100, (8, 4)),
        ((10, 5), (2, 4), (9, 9), (3, 7), 100, (5, 9)),
        # Not two whole calls: one item of each comes first.
        ((40, 30), (3, 3), (9, 9), (7, 3), 120, (2, 1)),
        # No room beside the costliest.
        ((90, 30), (1, 1), (9, 9), (7, 3), 100, (1, 0)),
        # No more than the requests may carry.
        ((10, 5), (8, 8), (2, 1), (7, 3), 100, (2, 1)),
    ],
)
def test_the_worst_mix(
    tokens: tuple[int, int],
    micro_batch: tuple[int, int],
    most: tuple[int, int],
    peaks: tuple[int, int],
    budget: int,
    mix: tuple[int, int],
) -> None:
    def named(values: tuple[int, int]) -> dict[str, int]:
        return dict(zip(("video", "audio"), values, strict=True))

    found = worst_mix(
        tokens=named(tokens), micro_batch=named(micro_batch), most=named(most), peaks=named(peaks), budget=budget
    )
    assert found == {modality: count for modality, count in named(mix).items() if count}
