from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from orchestrator.engine import families
from orchestrator.errors import CheckpointError, ConfigError


def test_a_window_bounds_the_sequence() -> None:
    config = transformers.MistralConfig(max_position_embeddings=4096, sliding_window=512)
    assert families.resolve_max_model_len(config, "auto") == 512
    assert families.resolve_max_model_len(config, 512) == 512
    with pytest.raises(ConfigError, match=r"scheduler.max_model_len=513: .* window of 512 tokens; give at most 512"):
        families.resolve_max_model_len(config, 513)


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
        (transformers.Gemma3Config(), "layer_types"),
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
    [transformers.LlamaConfig(), transformers.Qwen2Config(), transformers.Qwen3Config(), transformers.InternVLConfig()],
    ids=lambda config: config.model_type,
)
def test_what_runs_is_not_refused(config: Any) -> None:
    families.refuse_unsupported(config)


@pytest.mark.parametrize("name", ["Qwen2_5_VL", "Qwen3VL"])
def test_positions_on_three_axes_are_refused(name: str) -> None:
    config, model_class = (
        getattr(transformers, f"{name}Config")(),
        getattr(transformers, f"{name}ForConditionalGeneration"),
    )
    config.text_config.num_hidden_layers = config.vision_config.depth = 1
    with torch.device("meta"):
        model = model_class._from_config(config)
    with pytest.raises(CheckpointError, match="M-RoPE"):
        families.refuse_decoder(model)


def test_latent_attention_is_refused() -> None:
    config = transformers.DeepseekV3Config()
    with pytest.raises(CheckpointError, match="latent attention"):
        families.kv_spec(config, "bfloat16", 2)
