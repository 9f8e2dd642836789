"""Loaders against transformers' own `from_pretrained`, and what they refuse."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from orchestrator.checkpoint import Checkpoint, locate
from orchestrator.config import ModelConfig, WeightsConfig
from orchestrator.device.cpu import CpuDevice
from orchestrator.engine.weights.base import WeightsLoader, model_bytes
from orchestrator.engine.weights.dummy import DummyLoader
from orchestrator.engine.weights.safetensors import SafetensorsLoader
from orchestrator.errors import CheckpointError

T: Any = transformers
VOCAB = 96
OPTIONS = WeightsConfig(loader="auto", io="auto", threads="auto", chunk_bytes="auto")
TEXT: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=VOCAB,
    max_position_embeddings=512,
    bos_token_id=None,
    eos_token_id=2,
    pad_token_id=1,
)
VISION: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=56, patch_size=14
)
QWEN_VISION: dict[str, Any] = dict(depth=2, hidden_size=32, intermediate_size=48, num_heads=4, out_hidden_size=32)
TOKENS: dict[str, int] = dict(image_token_id=90, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93)


class Counted:
    def __init__(self) -> None:
        self.total = 0

    def advance(self, amount: int) -> None:
        self.total += amount


def _internvl() -> Any:
    vision = {**VISION, "image_size": (56, 56), "patch_size": (14, 14), "model_type": "internvl_vision"}
    return T.InternVLConfig(
        vision_config=vision, text_config=T.LlamaConfig(**TEXT), image_token_id=90, image_seq_length=4
    )


def _llama() -> Any:
    return T.LlamaConfig(**TEXT, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})


def _qwen2_5_vl() -> Any:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6}
    return T.Qwen2_5_VLConfig(
        vision_config={**QWEN_VISION, "fullatt_block_indexes": [1], "patch_size": 14, "window_size": 112},
        text_config={**TEXT, "rope_parameters": rope},
        **TOKENS,
    )


def _qwen3_vl() -> Any:
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True, "rope_theta": 5e6}
    return T.Qwen3VLConfig(
        vision_config={**QWEN_VISION, "patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [1]},
        text_config={**TEXT, "head_dim": 8, "rope_parameters": rope},
        **TOKENS,
    )


def _opt() -> Any:
    return T.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        word_embed_proj_dim=32,
        eos_token_id=2,
    )


def _gemma3() -> Any:
    return T.Gemma3Config(
        vision_config={**VISION, "vision_use_head": False, "model_type": "siglip_vision_model"},
        text_config={**TEXT, "head_dim": 8, "sliding_window": 16, "model_type": "gemma3_text"},
        mm_tokens_per_image=4,
        image_token_index=90,
        boi_token_index=91,
        eoi_token_index=92,
    )


def _mixtral() -> Any:
    return T.MixtralConfig(**TEXT, num_local_experts=12, num_experts_per_tok=2)


FAMILIES: dict[str, Callable[[], Any]] = {
    "internvl": _internvl,
    "llama": _llama,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "opt": _opt,
    "gemma3": _gemma3,
    "mixtral": _mixtral,
}


def _auto(config: Any) -> Any:
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def _save(config: Any, folder: Path, max_shard_size: str = "5GB") -> None:
    torch.manual_seed(0)
    model = _auto(config).from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder, max_shard_size=max_shard_size)


def _checkpoint(folder: Path, load_format: Any = "auto") -> Checkpoint:
    model = ModelConfig(
        name="any",
        path=str(folder),
        revision=None,
        dtype="auto",
        load_format=load_format,
        trust_remote_code=False,
        profiler="auto",
    )
    return locate(model, make=lambda name: pytest.fail(name), cache_dir=folder)


def _on_meta(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        return _auto(config).from_config(config, dtype=dtype)


def _load(folder: Path, dtype: torch.dtype = torch.float32, loader: type[WeightsLoader] = SafetensorsLoader) -> Any:
    model = _on_meta(folder, dtype)
    loader().load(
        model, _checkpoint(folder), device=CpuDevice(), dtype=dtype, seed=0, progress=Counted(), options=OPTIONS
    )
    return model


def _reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return _auto(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=dtype)


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def _assert_same(model: Any, reference: Any) -> None:
    ours, theirs = _tensors(model), _tensors(reference)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert ours[name].device == tensor.device, name
        assert torch.equal(ours[name], tensor), name


def _logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.arange(3, 40)[None]).logits
    return logits


def _rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file({name: value.clone() for name, value in change(load_file(file)).items()}, file, metadata={"format": "pt"})


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    _save(_llama(), tmp_path)
    return tmp_path


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_from_pretrained(family: str, tmp_path: Path) -> None:
    _save(FAMILIES[family](), tmp_path)
    model, reference = _load(tmp_path), _reference(tmp_path)
    _assert_same(model, reference)
    assert torch.equal(_logits(model), _logits(reference))
    assert not model.training


@pytest.mark.parametrize("family", ["internvl", "gemma3", "qwen3_vl"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_equals_from_pretrained_in_other_types(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    _save(FAMILIES[family](), tmp_path)
    _assert_same(_load(tmp_path, dtype), _reference(tmp_path, dtype))


def test_modules_kept_in_float32_stay_so(tmp_path: Path) -> None:
    config = T.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=VOCAB)
    T.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with torch.device("meta"):
        model = T.T5ForConditionalGeneration._from_config(config, dtype=torch.float16)
    checkpoint = _checkpoint(tmp_path)
    SafetensorsLoader().load(
        model, checkpoint, device=CpuDevice(), dtype=torch.float16, seed=0, progress=Counted(), options=OPTIONS
    )
    _assert_same(model, T.T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16))
    assert model.decoder.block[0].layer[2].DenseReluDense.wo.weight.dtype == torch.float32


def test_shards_and_progress(tmp_path: Path) -> None:
    _save(_internvl(), tmp_path, max_shard_size="60KB")
    checkpoint, model, progress = _checkpoint(tmp_path), _on_meta(tmp_path), Counted()
    files = SafetensorsLoader().load(
        model, checkpoint, device=CpuDevice(), dtype=torch.float32, seed=0, progress=progress, options=OPTIONS
    )
    assert files == len(checkpoint.weight_files) > 2
    assert progress.total == checkpoint.total_bytes
    _assert_same(model, _reference(tmp_path))


def test_parameters_lie_in_one_allocation_in_the_order_of_the_file(tmp_path: Path) -> None:
    _save(_llama(), tmp_path, max_shard_size="30KB")
    checkpoint, model = _checkpoint(tmp_path), _load(tmp_path)
    parameters = list(model.parameters())
    assert len({parameter.untyped_storage().data_ptr() for parameter in parameters}) == 1
    assert all(parameter.storage_offset() * parameter.itemsize % 256 == 0 for parameter in parameters)
    size = sum(parameter.nbytes for parameter in parameters)
    assert size <= parameters[0].untyped_storage().nbytes() < size + 256 * len(parameters)
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    in_file = [places[entry.name] for entry in checkpoint.tensors if entry.name in places]
    assert in_file == sorted(in_file)
    assert len(in_file) == len(parameters)


def test_tied_weights_are_one_tensor(tmp_path: Path) -> None:
    _save(T.LlamaConfig(**TEXT, tie_word_embeddings=True), tmp_path)
    model = _load(tmp_path)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model_bytes(model) == model_bytes(_on_meta(tmp_path))


@pytest.mark.parametrize("equal", [True, False])
def test_both_of_a_tied_pair_in_the_file(equal: bool, tmp_path: Path) -> None:
    _save(T.LlamaConfig(**TEXT, tie_word_embeddings=True), tmp_path)

    def with_head(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        embedding = tensors["model.embed_tokens.weight"]
        return {**tensors, "lm_head.weight": embedding if equal else embedding + 1}

    _rewrite(tmp_path, with_head)
    model = _load(tmp_path)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) is equal
    _assert_same(model, _reference(tmp_path))


def test_names_of_older_releases(tmp_path: Path) -> None:
    _save(_qwen2_5_vl(), tmp_path)

    def older(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        names = {
            name: name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")
            for name in tensors
        }
        return {names[name]: value for name, value in tensors.items()}

    _rewrite(tmp_path, older)
    assert any(name.startswith("visual.") for name in load_file(tmp_path / "model.safetensors"))
    _assert_same(_load(tmp_path), _reference(tmp_path))


def test_names_without_the_base_prefix(llama: Path) -> None:
    reference = _reference(llama)
    _rewrite(llama, lambda tensors: {name.removeprefix("model."): value for name, value in tensors.items()})
    _assert_same(_load(llama), reference)


def test_missing_and_unused_tensors_are_both_named(llama: Path) -> None:
    old, new = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.upp_proj.weight"
    _rewrite(llama, lambda tensors: {new if name == old else name: value for name, value in tensors.items()})
    with pytest.raises(CheckpointError, match=re.escape(old)) as caught:
        _load(llama)
    assert new in str(caught.value)
    assert "close to" in str(caught.value)


def test_two_tensors_for_one_place_are_both_named(llama: Path) -> None:
    _rewrite(llama, lambda tensors: {**tensors, "norm.weight": tensors["model.norm.weight"] + 1})
    with pytest.raises(CheckpointError, match=r"both 'model\.norm\.weight' and 'norm\.weight' are meant"):
        _load(llama)


def test_a_missing_expert_is_refused(tmp_path: Path) -> None:
    _save(_mixtral(), tmp_path)
    _rewrite(tmp_path, lambda tensors: {name: value for name, value in tensors.items() if ".experts.3.w1." not in name})
    with pytest.raises(CheckpointError, match="experts"):
        _load(tmp_path)


def test_left_over_rotary_buffers_are_ignored(llama: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    _rewrite(llama, lambda tensors: {**tensors, **extra})
    _assert_same(_load(llama), _reference(llama))


def test_another_shape_names_the_tensor_and_both_shapes(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    with pytest.raises(CheckpointError, match=r"mlp.*\[48, 32\].*\[64, 32\]|mlp.*\[32, 48\].*\[32, 64\]"):
        _load(llama)


def test_a_file_cut_off_after_the_headers_were_read_names_the_tensor(llama: Path) -> None:
    checkpoint, model = _checkpoint(llama), _on_meta(llama)
    last = checkpoint.tensors[-1]
    with last.file.open("r+b") as file:
        file.truncate(last.end - 8)
    with pytest.raises(CheckpointError, match=re.escape(last.name)):
        SafetensorsLoader().load(
            model, checkpoint, device=CpuDevice(), dtype=torch.float32, seed=0, progress=Counted(), options=OPTIONS
        )


def _dummy(folder: Path, seed: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Counted]:
    model, progress = _on_meta(folder, dtype), Counted()
    checkpoint = _checkpoint(folder, "dummy")
    assert (
        DummyLoader().load(
            model, checkpoint, device=CpuDevice(), dtype=dtype, seed=seed, progress=progress, options=OPTIONS
        )
        == 0
    )
    assert progress.total == model_bytes(model)
    return model, progress


@pytest.mark.parametrize("family", FAMILIES)
def test_dummy_weights_give_finite_answers(family: str, tmp_path: Path) -> None:
    FAMILIES[family]().save_pretrained(tmp_path)
    model, _ = _dummy(tmp_path, seed=0)
    assert torch.isfinite(_logits(model)).all()
    assert not any(tensor.is_meta for tensor in _tensors(model).values())
    assert not model.training


def test_dummy_weights_follow_the_seed_and_not_the_threads(tmp_path: Path) -> None:
    _internvl().save_pretrained(tmp_path)
    first, _ = _dummy(tmp_path, seed=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        again, _ = _dummy(tmp_path, seed=1)
    finally:
        torch.set_num_threads(threads)
    _assert_same(first, again)
    other, _ = _dummy(tmp_path, seed=2)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_dummy_weights_leave_the_global_generator_alone(tmp_path: Path) -> None:
    _llama().save_pretrained(tmp_path)
    before = torch.get_rng_state()
    _dummy(tmp_path, seed=0)
    assert torch.equal(before, torch.get_rng_state())


def test_dummy_weights_by_kind(tmp_path: Path) -> None:
    T.LlamaConfig(**TEXT, attention_bias=True, tie_word_embeddings=True).save_pretrained(tmp_path)
    model, _ = _dummy(tmp_path, seed=0, dtype=torch.float32)
    layer = model.model.layers[0]
    assert torch.equal(layer.input_layernorm.weight, torch.ones(32))
    assert torch.equal(layer.self_attn.q_proj.bias, torch.zeros(32))
    assert 0.01 < float(layer.mlp.up_proj.weight.std()) < 0.03
    assert model.lm_head.weight is model.get_input_embeddings().weight
