"""What differs between families of models, read from a configuration: where things are, and what cannot be served."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from orchestrator.engine.base import KVSpec
from orchestrator.errors import CheckpointError, ConfigError

_NEUTRAL = {"final_logit_softcapping": None, "attn_logit_softcapping": None, "logit_scale": 1, "logits_scaling": 1}
"""Settings of a language model that the engine does not carry out, and the value that means they are off."""

_THREE_AXES = "its language model needs positions on three axes (M-RoPE)"


@dataclass(frozen=True)
class Placeholders:
    """Modality -> what stands for an item in a prompt, and the id whose embedding an encoder output replaces."""

    texts: dict[str, str]
    embed_ids: dict[str, int]


def refuse_unsupported(config: Any) -> None:
    """Refuse by name what would run and be wrong.

    Raises:
        CheckpointError: the model type, and what of it the engine does not have.
    """
    text = config.get_text_config()
    why = None
    if _has_three_axes(text):
        why = _THREE_AXES
    elif getattr(text, "is_encoder_decoder", False):
        why = "it is an encoder-decoder"
    elif any(kind != "full_attention" for kind in getattr(text, "layer_types", None) or ()):
        why = "some of its layers do not attend on the whole sequence (layer_types)"
    elif getattr(text, "use_bidirectional_attention", None):
        why = "its attention is not causal (use_bidirectional_attention)"
    else:
        for name, off in _NEUTRAL.items():
            if getattr(text, name, off) not in (off, None):
                why = f"its language model has {name}"
    if why:
        raise CheckpointError(f"a model of type '{config.model_type}' cannot be served: {why}")


def _has_three_axes(text_config: Any) -> bool:
    rope = getattr(text_config, "rope_parameters", None) or {}
    layers = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return any("mrope_section" in layer for layer in layers)


def refuse_decoder(model: Any) -> None:
    """Refuse what only the built model shows; it may be on meta.

    Raises:
        CheckpointError: the decoder cannot be called with one position a token and a cache from outside.
    """
    if hasattr(model.base_model, "get_rope_index"):
        raise CheckpointError(f"a model of type '{model.config.model_type}' cannot be served: {_THREE_AXES}")
    names = inspect.signature(model.get_decoder().forward).parameters
    missing = [name for name in ("inputs_embeds", "position_ids", "cache") if name not in names]
    if missing or model.get_output_embeddings() is None:
        raise CheckpointError(
            f"a model of type '{model.config.model_type}' cannot be served: its decoder does not take "
            f"{', '.join(missing) or 'an output head'}"
        )


def kv_spec(config: Any, dtype: str, dtype_bytes: int) -> KVSpec:
    """The shape of a token in the KV cache.

    Raises:
        CheckpointError: the model keeps keys and values of another kind (latent attention).
    """
    text = config.get_text_config()
    if getattr(text, "kv_lora_rank", None):
        raise CheckpointError(f"a model of type '{config.model_type}' cannot be served: it has latent attention")
    heads = text.num_attention_heads
    return KVSpec(
        num_layers=text.num_hidden_layers,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        dtype=dtype,
        dtype_bytes=dtype_bytes,
    )


def resolve_max_model_len(config: Any, wanted: int | str) -> int:
    """Tokens of the longest sequence.

    Raises:
        ConfigError: more than the model has positions for, or `auto` where it does not say.
    """
    text, field = config.get_text_config(), "scheduler.max_model_len"
    limits = {
        "has positions for": getattr(text, "max_position_embeddings", None),
        # Within its window such a model attends on everything, and beyond it the paged attention would differ.
        "attends on a window of": getattr(text, "sliding_window", None),
    }
    known = {what: int(most) for what, most in limits.items() if most is not None}
    if not known:
        if isinstance(wanted, str):
            raise ConfigError.of(field, "the model does not say how long a sequence may be; give a number", wanted)
        return wanted
    what, most = min(known.items(), key=lambda limit: limit[1])
    if isinstance(wanted, str):
        return most
    if wanted > most:
        raise ConfigError.of(field, f"the model {what} {most} tokens; give at most {most}", wanted)
    return wanted


def placeholders(config: Any, processor: Any, model_class: Any) -> Placeholders:
    """How items enter a prompt of this model; nothing for a model without media."""
    embed_id = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
    text = getattr(processor, "image_token", None)
    encodes = hasattr(model_class, "get_image_features") and getattr(processor, "image_processor", None) is not None
    if embed_id is None or text is None or not encodes:
        return Placeholders({}, {})
    return Placeholders({"image": str(text)}, {"image": int(embed_id)})
