from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from orchestrator.engine.base import Engine, Media, Output, Request
from orchestrator.engine.kv_cache import BlockPool, Int64s, slots_of
from orchestrator.engine.transformers import TransformersEngine
from orchestrator.errors import CheckpointError, ConfigError, StageError, VerificationError
from orchestrator.events import SilentEvents
from orchestrator.modality.base import DummyBatch
from tests.tiny_models import (
    PLACEHOLDER,
    alone,
    errors_of,
    image,
    internvl_folder,
    make_engine,
    request,
    text_config,
    text_folder,
)

LONG = "tell me all there is to say about the paged cache and its blocks, slots, tables and pages; " * 4
MIXED = [
    request(f"{PLACEHOLDER} what is this?", image(1), chat=False, max_tokens=12),
    request("a text without media", chat=False, max_tokens=7),
    request(f"first {PLACEHOLDER} then {PLACEHOLDER} end", image(2, 120, 60), image(3), chat=False, max_tokens=9),
    request(LONG, chat=False, max_tokens=6),
    request(f"again {PLACEHOLDER}", image(1), chat=False, max_tokens=3),
    request(f"{LONG}{PLACEHOLDER}{LONG}", image(4, 60, 170), chat=False, max_tokens=8),
]


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def internvl(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return internvl_folder(tmp_path_factory.mktemp("internvl"), family=request.param)


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return internvl_folder(tmp_path_factory.mktemp("vlm"))


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_folder(tmp_path_factory.mktemp("text"))


@pytest.fixture
def engine(vlm: Path) -> Iterator[TransformersEngine]:
    made = make_engine(vlm)
    yield made
    made.close()


def assert_like_oracle(engine: TransformersEngine, asked: list[Request], outputs: list[Output]) -> None:
    for one, output in zip(asked, outputs, strict=True):
        chosen, best = engine.oracle_logprobs(one, output)
        assert output.logprobs == pytest.approx(chosen, abs=1e-4)
        assert chosen == pytest.approx(best, abs=1e-4)


def faults(engine: TransformersEngine, asked: list[Request], outputs: list[Output]) -> float:
    """The largest distance between the engine's log-probabilities and the model's own."""
    return max(
        abs(ours - own)
        for one, output in zip(asked, outputs, strict=True)
        for ours, own in zip(output.logprobs, engine.oracle_logprobs(one, output)[0], strict=True)
    )


@pytest.mark.parametrize("tokens_a_step", [64, 4096])
def test_a_mixed_batch_equals_generate(internvl: Path, tokens_a_step: int) -> None:
    engine = make_engine(internvl, blocks=160, scheduler={"max_num_batched_tokens": tokens_a_step})
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(internvl)
    outputs = engine.generate(MIXED)
    assert [output.token_ids for output in outputs] == [
        alone(model, engine.processor, asked, asked.text) for asked in MIXED
    ]
    assert {output.finish_reason for output in outputs} == {"length"}
    assert_like_oracle(engine, MIXED, outputs)


def test_a_text_model_equals_generate(text_model: Path) -> None:
    engine = make_engine(text_model, encoder_tokens=0, scheduler={"max_num_batched_tokens": 32})
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(text_model)
    asked = [request(f"{n} bottles of beer" * n, chat=False, max_tokens=10 + n) for n in range(1, 7)]
    outputs = engine.generate(asked)
    assert [output.token_ids for output in outputs] == [alone(model, engine.processor, one, one.text) for one in asked]
    assert_like_oracle(engine, asked, outputs)
    assert engine.modalities() == ()


def test_it_is_an_engine(engine: TransformersEngine) -> None:
    assert isinstance(engine, Engine)
    assert engine.modalities() == ("image", "video")
    assert engine.max_model_len == 4096
    assert engine.capture([1, 2]) == []


def test_a_step_holds_the_prefill_of_one_and_the_decode_of_another(vlm: Path) -> None:
    engine = make_engine(vlm, scheduler={"max_num_batched_tokens": 24})
    asked = [MIXED[1], MIXED[0]]
    outputs = engine.generate(asked)
    assert any(step.num_decodes and step.num_prefills for step in engine.steps)
    assert_like_oracle(engine, asked, outputs)


def test_a_later_chunk_reads_the_blocks_of_an_earlier_one(vlm: Path) -> None:
    engine = make_engine(vlm, scheduler={"max_num_batched_tokens": 48})
    asked = [MIXED[3]]
    outputs = engine.generate(asked)
    assert sum(step.num_prefills for step in engine.steps) == -(-len(outputs[0].prompt_token_ids) // 48)
    assert_like_oracle(engine, asked, outputs)


def test_a_stop_token_ends_a_text(vlm: Path) -> None:
    engine = make_engine(vlm)
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(vlm)
    asked = [request(f"text {n}", chat=False, max_tokens=200, ignore_eos=False) for n in range(4)]
    outputs = engine.generate(asked)
    assert [output.token_ids for output in outputs] == [alone(model, engine.processor, one, one.text) for one in asked]
    assert all((output.finish_reason == "stop") == (output.token_ids[-1] == 258) for output in outputs)


def test_a_prompts_ids_are_the_processors(engine: TransformersEngine) -> None:
    asked = [*MIXED, request("what are these?", image(1), image(2, 120, 60)), request("nothing to see")]
    outputs = engine.generate(asked)
    for one, output in zip(asked, outputs, strict=True):
        text = one.text
        if one.chat:
            marks = f"{PLACEHOLDER}\n" * len(one.media)
            text = f"<|im_start|>user\n{marks}{one.text}<|im_end|>\n<|im_start|>assistant\n"
        pictures = [media.data for media in one.media] or None
        batch = engine.processor(text=[text], images=pictures, return_tensors="pt")
        assert output.prompt_token_ids == batch["input_ids"][0].tolist()


def test_everything_is_given_back(engine: TransformersEngine) -> None:
    free = engine._need_memory().pool.num_free
    engine.generate(MIXED)
    assert engine._need_memory().pool.num_free == free
    assert engine.held() == {"encoder outputs": 4, "media inputs": 4, "requests": 0}
    engine.clear_caches()
    assert not any(engine.held().values())
    assert_like_oracle(engine, MIXED, engine.generate(MIXED))
    asyncio.run(engine.aclear_caches())
    assert not any(engine.held().values())


def test_an_image_that_comes_again_is_encoded_once(engine: TransformersEngine) -> None:
    asked = [MIXED[0], replace(MIXED[0], request_id="again"), MIXED[4]]
    first = engine.generate(asked)
    assert sum(step.num_encoded for step in engine.steps) == 1
    second = engine.generate(asked)
    assert sum(step.num_encoded for step in engine.steps) == 0
    assert [output.token_ids for output in first] == [output.token_ids for output in second]


def test_items_that_take_turns_in_a_small_encoder_cache(vlm: Path) -> None:
    engine = make_engine(vlm, encoder_tokens=12)
    assert_like_oracle(engine, MIXED[:3], engine.generate(MIXED[:3]))


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_items_encoded_together_are_as_items_encoded_alone(vlm: Path, micro_batch: int) -> None:
    engine = make_engine(vlm, encoder={"micro_batch": micro_batch})
    asked = [request(PLACEHOLDER, image(seed, 56 * (1 + seed % 2)), chat=False, max_tokens=3) for seed in range(5)]
    assert_like_oracle(engine, asked, engine.generate(asked))


def test_a_request_that_cannot_be_served_ends_alone(vlm: Path) -> None:
    engine = make_engine(
        vlm,
        blocks=8,
        encoder_tokens=12,
        scheduler={"max_model_len": 512},
        mm={"image": {"max_size": [200, 100]}},
    )
    wrong = [
        request("x" * 600, chat=False),
        request("x" * 200, chat=False),
        request("x", image(1), image(2), image(3), image(4)),
        request("x", image(1, 201, 100)),
        request("x", image(1, 168, 56)),
        request("x", image(1), chat=False),
        request(f"{PLACEHOLDER} x", chat=False),
        request("x", max_tokens=0),
        Request("r", "x", (Media("audio", None),)),
        Request("r", "x", (Media("image", "a path"),)),
        request("", chat=False),
    ]
    right = request("x", image(1))
    outputs = engine.generate([*wrong[:5], right, *wrong[5:]])
    served = outputs.pop(5)
    assert [output.finish_reason for output in outputs] == ["error"] * len(wrong)
    for error, parts in zip(
        errors_of(outputs),
        [
            ("600 tokens", "616 in all", "max_model_len is 512"),
            ("216 tokens take 14 blocks", "has 8"),
            ("4 image items", "mm.limit_per_prompt.image=3"),
            ("201 x 100", "mm.image.max_size is 200 x 100"),
            ("16 encoder tokens", "holds 12"),
            ("placeholders for nothing", "carries 1 image"),
            ("placeholders for 1 image", "carries nothing"),
            ("max_tokens is 0", "at least 1"),
            ("does not take audio", "it takes image, video"),
            ("must be a PIL image, not a str",),
            ("no tokens",),
        ],
        strict=True,
    ):
        assert all(part in error for part in parts), error
    assert_like_oracle(engine, [right], [served])


class _WrongPool(BlockPool):
    """Hands out blocks that are somebody's already."""

    def allocate(self, count: int) -> list[int]:
        return [1] * count

    def free(self, blocks: Any) -> None:
        return None


def test_blocks_shared_by_mistake_show_in_the_logprobs(engine: TransformersEngine) -> None:
    engine._need_memory().pool = _WrongPool(64)
    asked = [MIXED[1], MIXED[3]]
    assert faults(engine, asked, engine.generate(asked)) > 1e-2


def test_garbage_in_a_block_shows_in_the_logprobs(vlm: Path) -> None:
    engine = make_engine(vlm, scheduler={"max_num_batched_tokens": 48})
    kv = engine._need_memory().cache
    assert kv is not None and engine._loaded is not None
    runner = engine._loaded.runner
    execute = runner.execute

    def spoilt(*arguments: Any) -> Any:
        kv.storage[1] = 1.0
        return execute(*arguments)

    runner.execute = spoilt  # type: ignore[assignment,method-assign]
    assert faults(engine, [MIXED[3]], engine.generate([MIXED[3]])) > 1e-2


def test_a_slot_off_by_one_shows_in_the_logprobs(engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def off(table: Any, start: int, stop: int, block_size: int) -> Int64s:
        return slots_of(table, start, stop, block_size) + 1

    monkeypatch.setattr("orchestrator.engine.attention.base.slots_of", off)
    assert faults(engine, [MIXED[1]], engine.generate([MIXED[1]])) > 1e-2


def test_the_oracle_refuses_ids_that_the_processor_would_not_make(engine: TransformersEngine) -> None:
    outputs = engine.generate([MIXED[1]])
    outputs[0].prompt_token_ids[0] += 1
    with pytest.raises(VerificationError, match="the engine made"):
        engine.oracle_logprobs(MIXED[1], outputs[0])


def test_two_engines_do_not_disturb_each_other(vlm: Path, text_model: Path) -> None:
    one, other = make_engine(vlm), make_engine(text_model, encoder_tokens=0)
    before = one.generate(MIXED[:2]), other.generate(MIXED[1:2])
    one.oracle_logprobs(MIXED[0], before[0][0])
    after = one.generate(MIXED[:2]), other.generate(MIXED[1:2])
    assert before == after
    one.close()
    assert other.generate(MIXED[1:2]) == after[1]


def test_dummy_work_leaves_nothing_but_the_encoders_outputs(engine: TransformersEngine) -> None:
    item = engine.media_inputs(Media("image", image(5, 170, 60)))
    engine.clear_caches()
    engine.encode_dummy(DummyBatch({"image": item}), {"image": 3})
    engine.dummy_step(256, 3840)
    engine.dummy_logits(4)
    assert engine.held() == {"encoder outputs": 3, "media inputs": 0, "requests": 0}
    engine.clear_caches()
    assert_like_oracle(engine, MIXED, engine.generate(MIXED))


def test_bytes_are_what_was_asked_for(engine: TransformersEngine) -> None:
    assert engine.reserve_encoder_cache(100) == 100 * 64 * 4
    assert engine.allocate_kv(5) == 6 * engine.kv_spec.bytes_per_block(16)
    assert engine.kv_spec.bytes_per_block(16) == 16 * 2 * 2 * 2 * 16 * 4


def test_a_cache_of_another_type_still_serves(vlm: Path) -> None:
    engine = make_engine(vlm, kv={"dtype": "bfloat16"}, scheduler={"max_num_batched_tokens": 48})
    assert engine.kv_spec.dtype_bytes == 2
    assert 0 < faults(engine, [MIXED[3]], engine.generate([MIXED[3]])) < 0.1


def test_weights_in_another_type(vlm: Path) -> None:
    engine = make_engine(vlm, load=False, model={"dtype": "bfloat16", "load_format": "dummy"})
    report = engine.load(SilentEvents())
    assert (report.dtype, report.loader, report.files) == ("bfloat16", "dummy", 0)
    assert report.bytes >= 2 * report.parameters
    engine.reserve_encoder_cache(64)
    engine.allocate_kv(32)
    assert [output.finish_reason for output in engine.generate(MIXED[:2])] == ["length", "length"]


def test_close_ends_it_and_may_be_called_again(vlm: Path) -> None:
    engine = make_engine(vlm)
    engine.close()
    engine.close()
    assert not any(engine.held().values())
    with pytest.raises(StageError, match="no weights"):
        engine.generate(MIXED)


def test_requests_before_the_cache_are_refused(vlm: Path) -> None:
    engine = make_engine(vlm, load=False)
    engine.load(SilentEvents())
    with pytest.raises(StageError, match="before allocate_kv"):
        engine.generate(MIXED)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheduler": {"max_model_len": 5000}}, "scheduler.max_model_len=5000: the model has positions for 4096"),
        ({"engine": {"tensor_parallel_size": 2}}, "engine.tensor_parallel_size=2: .* give 1"),
        ({"mm": {"processor_kwargs": {"max_patch": 6}}}, "mm.processor_kwargs.max_patch: .* did you mean max_patches?"),
        (
            {"mm": {"processor_kwargs": {"images_kwargs": {"max_patch": 6}}}},
            "mm.processor_kwargs.images_kwargs.max_patch: .* did you mean max_patches?",
        ),
        ({"mm": {"processor_kwargs": {"max_patches": "six"}}}, "mm.processor_kwargs.max_patches=six: .* refuses it"),
    ],
)
def test_what_cannot_work_is_refused_by_name(vlm: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(vlm, **changes)


@pytest.mark.parametrize("spelling", [{"max_patches": 2}, {"images_kwargs": {"max_patches": 2}}])
def test_processor_options_are_heeded(vlm: Path, spelling: dict[str, Any]) -> None:
    picture = Media("image", image(1, 300, 200))
    many = make_engine(vlm).media_inputs(picture)
    engine = make_engine(vlm, mm={"processor_kwargs": spelling})
    few = engine.media_inputs(picture)
    assert few.num_embeds < many.num_embeds
    assert few.content_hash != many.content_hash
    assert engine.processor._get_num_multimodal_tokens(image_sizes=[[200, 300]])["num_image_tokens"] == [
        len(few.token_ids)
    ]
    asked = [request(PLACEHOLDER, image(1, 300, 200), chat=False, max_tokens=3)]
    assert_like_oracle(engine, asked, engine.generate(asked))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}, "three axes"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention in layer_types"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ],
)
def test_a_decoder_that_the_engine_lacks_is_refused(tmp_path: Path, settings: dict[str, Any], why: str) -> None:
    config = text_config("llama")
    for name, value in settings.items():
        setattr(config, name, value)
    with pytest.raises(CheckpointError, match=f"'llama' cannot be served: .*{why}"):
        make_engine(text_folder(tmp_path, config=config))


@pytest.mark.parametrize(
    ("file", "changes", "says"),
    [
        ("config.json", {"num_attention_heads": 5}, "transformers cannot read it: .*not a multiple of the number of"),
        ("config.json", {"hidden_size": "64"}, "transformers cannot read it: .*'hidden_size' expected int, got str"),
        ("config.json", {"hidden_act": "gelo"}, "LlamaForCausalLM cannot be made from its config.json .*gelo"),
        ("generation_config.json", None, "generation_config.json: transformers cannot read it"),
    ],
)
def test_settings_that_make_no_sense_are_named(
    text_model: Path, tmp_path: Path, file: str, changes: dict[str, Any] | None, says: str
) -> None:
    folder = Path(shutil.copytree(text_model, tmp_path / "m"))
    path = folder / file
    path.write_text("{" if changes is None else json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=f"{folder}.*{says}"):
        make_engine(folder)
