"""What differs between families of models, read from a configuration: where things are, and what cannot be served."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from orchestrator.engine.attention.base import WINDOW
from orchestrator.engine.base import KVSpec
from orchestrator.errors import CheckpointError, ConfigError

_NEUTRAL = {"final_logit_softcapping": None, "attn_logit_softcapping": None, "logit_scale": 1, "logits_scaling": 1}
"""Settings of a language model that the engine does not carry out, and the value that means they are off."""

_SLIDING = "sliding_attention"
_BOTH_WAYS_IN_IMAGES = frozenset({"gemma3"})
"""Models whose own masks are causal but for the tokens of one image; others' masks are not known."""


def refuse_unsupported(config: Any) -> None:
    """Refuse by name what would run and be wrong.

    Raises:
        CheckpointError: the model type, and what of it the engine does not have.
    """
    text = config.get_text_config()
    why = None
    if getattr(text, "is_encoder_decoder", False):
        why = "it is an encoder-decoder"
    elif other := sorted({*(getattr(text, "layer_types", None) or ())} - {"full_attention", _SLIDING}):
        why = f"some of its layers are of another kind ({', '.join(other)} in layer_types)"
    elif getattr(text, "use_bidirectional_attention", None):
        why = "its attention is not causal (use_bidirectional_attention)"
    else:
        for name, off in _NEUTRAL.items():
            if getattr(text, name, off) not in (off, None):
                why = f"its language model has {name}"
    if why:
        raise _refusal(config.model_type, why)


@dataclass(frozen=True)
class Traits:
    """What sets a model apart from others when it runs.

    Attributes:
        axes: positions that a token has: 1, or 3 with M-RoPE.
        deepstack: encoder outputs beside the last layer's that the decoder adds in its first layers.
        both_ways: whether the tokens of an image look at each other whatever their order.
    """

    axes: int = 1
    deepstack: int = 0
    both_ways: bool = False


def traits(model: Any) -> Traits:
    """Read off a built model; it may be on meta.

    Raises:
        CheckpointError: what the engine would have to call and the model lacks, or does in its own way.
    """
    kind = model.config.model_type
    names = inspect.signature(model.get_decoder().forward).parameters
    missing = [name for name in ("inputs_embeds", "position_ids", "cache") if name not in names]
    if missing or model.get_output_embeddings() is None:
        raise _refusal(kind, f"its decoder does not take {', '.join(missing) or 'an output head'}")
    if not model.get_decoder()._supports_attention_backend:
        raise _refusal(kind, "its attention cannot be replaced (_supports_attention_backend)")
    both_ways = looks_both_ways(kind, type(model))
    axes = 3 if hasattr(model.base_model, "get_rope_index") else 1
    if axes == 3:
        _refuse_rope_index(kind, model.base_model.get_rope_index)
    elif _has_three_axes(model.config.get_text_config()):
        raise _refusal(kind, "its language model needs positions on three axes, and it has no get_rope_index")
    deepstack = 0
    if "deepstack_visual_embeds" in names:
        layers = getattr(getattr(model.config, "vision_config", None), "deepstack_visual_indexes", None)
        if layers is None:
            raise _refusal(kind, "its decoder takes DeepStack, and its vision_config has no deepstack_visual_indexes")
        deepstack = len(layers)
    return Traits(axes, deepstack, both_ways)


def looks_both_ways(model_type: str, model_class: Any) -> bool:
    """Whether an image's tokens look at each other whatever their order.

    Raises:
        CheckpointError: the model makes masks of a kind that is not known.
    """
    if not hasattr(model_class, "create_masks_for_generate"):
        return False
    if model_type not in _BOTH_WAYS_IN_IMAGES:
        raise _refusal(model_type, "it makes attention masks of its own (create_masks_for_generate)")
    return True


def attention_needs(config: Any, max_model_len: int) -> frozenset[str]:
    """Abilities that an attention backend must have beyond causal attention on everything."""
    window = getattr(config.get_text_config(), "sliding_window", None)
    layers = getattr(config.get_text_config(), "layer_types", None)
    passed = window is not None and window < max_model_len and (layers is None or _SLIDING in layers)
    return frozenset({WINDOW}) if passed else frozenset()


def _has_three_axes(text_config: Any) -> bool:
    rope = getattr(text_config, "rope_parameters", None) or {}
    layers = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return any("mrope_section" in layer for layer in layers)


def _refuse_rope_index(kind: str, method: Any) -> None:
    takes = inspect.signature(method).parameters
    # What takes the lengths of recordings finds the items in the ids by itself.
    needed = ("input_ids",) if "audio_seqlens" in takes else ("input_ids", "mm_token_type_ids")
    missing = [name for name in needed if name not in takes]
    if missing:
        raise _refusal(kind, f"its get_rope_index does not take {' and '.join(missing)}")


def _refusal(model_type: str, why: str) -> CheckpointError:
    return CheckpointError(f"a model of type '{model_type}' cannot be served: {why}")


def kv_spec(config: Any, dtype: str, dtype_bytes: int) -> KVSpec:
    """The shape of a token in the KV cache.

    Raises:
        CheckpointError: the model keeps keys and values of another kind (latent attention).
    """
    text = config.get_text_config()
    if getattr(text, "kv_lora_rank", None):
        raise _refusal(config.model_type, "it has latent attention")
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
    most, field = getattr(config.get_text_config(), "max_position_embeddings", None), "scheduler.max_model_len"
    if most is None:
        if isinstance(wanted, str):
            raise ConfigError.of(field, "the model does not say how long a sequence may be; give a number", wanted)
        return wanted
    if isinstance(wanted, str):
        return int(most)
    if wanted > most:
        raise ConfigError.of(field, f"the model has positions for {most} tokens; give at most {most}", wanted)
    return wanted
