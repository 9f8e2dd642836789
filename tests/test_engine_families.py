from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from orchestrator.engine import families
from orchestrator.engine.attention.base import WINDOW
from orchestrator.engine.placeholders import placeholders, refuse_without
from orchestrator.errors import CheckpointError, ConfigError


class SupportsImages:
    """A model class as far as it is looked at."""

    def get_image_features(self) -> None:
        return None


def on_meta(config: Any, model_class: Any) -> Any:
    with torch.device("meta"):
        return model_class._from_config(config)


def test_positions_bound_the_sequence_and_a_window_does_not() -> None:
    config = transformers.MistralConfig(max_position_embeddings=4096, sliding_window=512)
    assert families.resolve_max_model_len(config, "auto") == 4096
    assert families.resolve_max_model_len(config, 513) == 513
    with pytest.raises(ConfigError, match=r"scheduler.max_model_len=4097: .* for 4096 tokens; give at most 4096"):
        families.resolve_max_model_len(config, 4097)


def test_a_window_is_needed_only_where_a_sequence_passes_it() -> None:
    mistral = transformers.MistralConfig(sliding_window=512)
    assert families.attention_needs(mistral, 513) == {WINDOW}
    assert families.attention_needs(mistral, 512) == set()
    assert families.attention_needs(transformers.Qwen3Config(use_sliding_window=False), 1 << 20) == set()
    assert families.attention_needs(transformers.Gemma3Config(), 8192) == {WINDOW}


def test_a_model_without_a_limit_needs_a_number() -> None:
    config: Any = transformers.PreTrainedConfig()
    assert families.resolve_max_model_len(config, 77) == 77
    with pytest.raises(ConfigError, match=r"scheduler.max_model_len=auto: .* give a number"):
        families.resolve_max_model_len(config, "auto")


def test_heads_of_a_size_of_their_own() -> None:
    config = transformers.Qwen3Config(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_hidden_layers=3
    )
    spec = families.kv_spec(config, "bfloat16", 2)
    assert (spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.dtype_bytes) == (3, 2, 32, 2)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (transformers.Qwen3NextConfig(), "linear_attention in layer_types"),
        (transformers.Gemma2Config(), "logit_softcapping"),
        (transformers.T5Config(), "encoder-decoder"),
        (transformers.GraniteConfig(logits_scaling=8.0), "logits_scaling"),
        (transformers.CohereConfig(), "logit_scale"),
    ],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_what_would_run_and_be_wrong_is_refused(config: Any, why: str) -> None:
    with pytest.raises(CheckpointError, match=f"'{config.model_type}' cannot be served: .*{why}"):
        families.refuse_unsupported(config)


@pytest.mark.parametrize(
    "config",
    [
        *(transformers.LlamaConfig(), transformers.Qwen2Config(), transformers.Qwen3Config(), transformers.OPTConfig()),
        *(transformers.InternVLConfig(), transformers.Qwen3VLConfig(), transformers.Gemma3Config()),
    ],
    ids=lambda config: config.model_type,
)
def test_what_runs_is_not_refused(config: Any) -> None:
    families.refuse_unsupported(config)


@pytest.mark.parametrize(("name", "deepstack"), [("Qwen2_5_VL", 0), ("Qwen3VL", 3)])
def test_traits_are_read_off_the_model(name: str, deepstack: int) -> None:
    config = getattr(transformers, f"{name}Config")()
    config.text_config.num_hidden_layers = config.vision_config.depth = 1
    model = on_meta(config, getattr(transformers, f"{name}ForConditionalGeneration"))
    assert families.traits(model) == families.Traits(axes=3, deepstack=deepstack)


def test_masks_that_are_not_known_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"'paligemma' cannot be served: .* \(create_masks_for_generate\)"):
        families.looks_both_ways("paligemma", transformers.PaliGemmaForConditionalGeneration)
    assert families.looks_both_ways("gemma3", transformers.Gemma3ForConditionalGeneration)
    assert not families.looks_both_ways("llama", transformers.LlamaForCausalLM)


def test_attention_that_cannot_be_replaced_is_refused() -> None:
    model = on_meta(transformers.LlamaConfig(num_hidden_layers=1), transformers.LlamaForCausalLM)
    assert families.traits(model) == families.Traits()
    model.get_decoder()._supports_attention_backend = False
    with pytest.raises(CheckpointError, match="'llama' cannot be served: its attention cannot be replaced"):
        families.traits(model)


def test_a_decoder_without_positions_is_refused() -> None:
    model = on_meta(transformers.BloomConfig(n_layer=1), transformers.BloomForCausalLM)
    with pytest.raises(CheckpointError, match="'bloom' cannot be served: its decoder does not take position_ids"):
        families.traits(model)


@pytest.mark.parametrize(
    ("config", "processor", "model_class", "missing"),
    [
        ({}, {"image_processor": 1, "image_token": "<i>"}, object, "object has no get_image_features"),
        ({}, {"image_token": "<i>"}, SupportsImages, "SimpleNamespace has no image_processor"),
        ({}, {"image_processor": 1}, SupportsImages, "SimpleNamespace has no image_token"),
        ({}, {"image_processor": 1, "image_token": "<i>"}, SupportsImages, "SimpleNamespace has no image_token_id"),
    ],
)
def test_what_a_model_lacks_to_take_images_is_named(
    config: dict[str, Any], processor: dict[str, Any], model_class: Any, missing: str
) -> None:
    settings, made = SimpleNamespace(model_type="odd", vision_config={}, **config), SimpleNamespace(**processor)
    with pytest.raises(CheckpointError, match=f"'odd' cannot be given images: {missing}; mm.limit_per_prompt.image=0"):
        refuse_without("image", settings, made, model_class)
    assert placeholders(settings, made, model_class).texts == {}


def test_a_placeholder_may_be_token_zero() -> None:
    settings = SimpleNamespace(model_type="odd", image_token_id=0)
    made = SimpleNamespace(image_processor=1, image_token="<i>")
    assert placeholders(settings, made, SupportsImages).embed_ids == {"image": 0}


def test_latent_attention_is_refused() -> None:
    config = transformers.DeepseekV3Config()
    with pytest.raises(CheckpointError, match="latent attention"):
        families.kv_spec(config, "bfloat16", 2)
