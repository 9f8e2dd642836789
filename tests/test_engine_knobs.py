"""Settings that change how the engine works: each test fails if its setting is ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from orchestrator.engine.attention.reference import ReferenceAttention
from orchestrator.engine.transformers import TransformersEngine
from orchestrator.errors import ConfigError
from orchestrator.events import SilentEvents
from tests.tiny_families import gemma3, text_only
from tests.tiny_models import PLACEHOLDER, errors_of, image, internvl_folder, make_engine, request, resolve


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return internvl_folder(tmp_path_factory.mktemp("vlm"))


def pictures(count: int) -> list[Any]:
    return [request(PLACEHOLDER, image(seed), chat=False, max_tokens=2) for seed in range(count)]


def encoder_calls(engine: TransformersEngine) -> list[int]:
    """Images in each call of the encoder, from now on."""
    sizes: list[int] = []
    tower = engine._need().model.model.vision_tower
    tower.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(kwargs["pixel_values"])), with_kwargs=True
    )
    return sizes


@pytest.mark.parametrize(("micro_batch", "sizes"), [("auto", [1, 1, 1, 1]), (1, [1, 1, 1, 1]), (3, [3, 1]), (8, [4])])
def test_micro_batch_is_the_items_of_one_encoder_call(vlm: Path, micro_batch: int | str, sizes: list[int]) -> None:
    engine = make_engine(vlm, encoder={"micro_batch": micro_batch})
    seen = encoder_calls(engine)
    engine.generate(pictures(4))
    assert seen == sizes


@pytest.mark.parametrize(("budget", "items"), [("auto", [4]), (8, [2, 2]), (4, [1, 1, 1, 1])])
def test_compute_budget_is_the_encoder_tokens_of_one_step(vlm: Path, budget: int | str, items: list[int]) -> None:
    engine = make_engine(vlm, encoder={"compute_budget": budget})
    assert not any(errors_of(engine.generate(pictures(4))))
    assert [step.num_encoded for step in engine.steps if step.num_encoded] == items


def test_no_images_where_the_limit_is_none(vlm: Path) -> None:
    engine = make_engine(vlm, mm={"limit_per_prompt": {"image": 0, "video": 0, "audio": 0}})
    assert errors_of(engine.generate(pictures(1))) == ["the request carries 1 image items; mm.limit_per_prompt.image=0"]


@pytest.mark.parametrize("most", ["auto", 40])
def test_max_model_len_ends_what_is_accepted(vlm: Path, most: int | str) -> None:
    engine = make_engine(vlm, blocks=300, scheduler={"max_model_len": most})
    limit = 4096 if most == "auto" else int(most)
    assert engine.max_model_len == limit
    fits, does_not = engine.generate(
        [request("x" * (limit - 1), chat=False, max_tokens=1), request("x" * limit, chat=False, max_tokens=1)]
    )
    assert fits.error is None
    assert does_not.error is not None and f"max_model_len is {limit}" in does_not.error


def test_max_num_seqs_and_tokens_bound_a_step(vlm: Path) -> None:
    engine = make_engine(vlm, scheduler={"max_num_seqs": 2, "max_num_batched_tokens": 16})
    engine.generate([request(f"text {number}" * 3, chat=False, max_tokens=4) for number in range(5)])
    assert max(step.num_decodes + step.num_prefills for step in engine.steps) == 2
    assert max(step.num_tokens for step in engine.steps) == 16


@pytest.mark.parametrize(("dtype", "size"), [("auto", 4), ("float32", 4), ("bfloat16", 2)])
def test_kv_dtype_is_the_caches(vlm: Path, dtype: str, size: int) -> None:
    engine = make_engine(vlm, kv={"dtype": dtype})
    cache = engine._need_memory().cache
    assert cache is not None
    assert cache.storage.element_size() == engine.kv_spec.dtype_bytes == size


@pytest.mark.parametrize("block_size", [8, 32])
def test_block_size_is_the_caches(vlm: Path, block_size: int) -> None:
    engine = make_engine(vlm, kv={"block_size": block_size})
    cache = engine._need_memory().cache
    assert cache is not None and cache.block_size == block_size
    assert not any(errors_of(engine.generate(pictures(3))))


class _Plain(ReferenceAttention):
    """A backend that has causal attention on everything, and no more; an image that looks both ways breaks it."""

    abilities: ClassVar[frozenset[str]] = frozenset()

    def attend(self, *arguments: Any) -> torch.Tensor:
        assert not arguments[5].both_ways
        return super().attend(*arguments)


def _resolve(group: str, name: str) -> Any:
    return _Plain if (group, name) == ("attention", "plain") else resolve(group, name)


def test_a_backend_without_what_the_model_needs_is_refused(tmp_path: Path) -> None:
    engine = make_engine(text_only(tmp_path, "mistral"), load=False, engine={"attention": "plain"})
    engine._resolve = _resolve
    with pytest.raises(ConfigError, match=r"engine.attention=plain: the model needs attention .*; auto would work"):
        engine.load(SilentEvents())


def test_a_window_that_no_sequence_passes_needs_nothing(tmp_path: Path) -> None:
    folder = text_only(tmp_path, "mistral")
    engine = make_engine(folder, load=False, engine={"attention": "plain"}, scheduler={"max_model_len": 32})
    engine._resolve = _resolve
    engine.load(SilentEvents())
    assert engine.max_model_len == 32


def test_images_that_look_both_ways_need_nothing_of_the_backend(tmp_path: Path) -> None:
    gemma3(tmp_path)
    limits = {"max_model_len": 32}
    engine = make_engine(tmp_path, load=False, engine={"attention": "plain"}, scheduler=limits)
    engine._resolve = _resolve
    engine.load(SilentEvents())
    engine.reserve_encoder_cache(32)
    engine.allocate_kv(8)
    asked = request("<start_of_image>", image(1), chat=False, max_tokens=6)
    (output,) = engine.generate([asked])
    assert output.logprobs == pytest.approx(engine.oracle_logprobs(asked, output)[0], abs=1e-4)
