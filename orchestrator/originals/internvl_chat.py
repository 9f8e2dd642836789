"""The configuration of OpenGVLab's InternVL 2, 2.5 and 3 (`model_type: internvl_chat`), in transformers' words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import CheckpointError

MODEL_TYPE = "internvl_chat"

_INTERNLM2 = "InternLM2ForCausalLM"
_TEXT_TYPES = {_INTERNLM2: "llama", "Qwen2ForCausalLM": "qwen2", "LlamaForCausalLM": "llama"}

_TEXT_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout"),
    *("use_sliding_window", "sliding_window", "max_window_layers"),
)
_INTERNLM2_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 103168, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048, "initializer_range": 0.02,
    "rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "rope_theta": 10000, "bias": True,
}  # fmt: skip
_VISION_DEFAULTS: Mapping[str, Any] = {
    "num_channels": 3, "patch_size": 14, "image_size": 224, "qkv_bias": False, "hidden_size": 3200,
    "num_attention_heads": 25, "intermediate_size": 12800, "qk_normalization": True, "num_hidden_layers": 48,
    "hidden_act": "gelu", "norm_type": "rms_norm", "layer_norm_eps": 1e-6, "initializer_range": 0.02,
}  # fmt: skip
"""What a key that is not there means: the defaults of the classes that were published with the weights."""

_SAME_IN_VISION = (
    *("num_channels", "hidden_size", "num_attention_heads", "intermediate_size", "num_hidden_layers"),
    *("hidden_act", "norm_type", "layer_norm_eps", "initializer_range"),
)
_ONLY = {"ps_version": "v2", "select_layer": -1, "pad2square": False, "use_backbone_lora": 0, "use_llm_lora": 0}
_MEANT = {"ps_version": "v1", "select_layer": -1, "pad2square": False, "use_backbone_lora": 0, "use_llm_lora": 0}
"""Settings that transformers' class has one value of, and what each is where it is not given."""


@dataclass(frozen=True)
class Conversation:
    """How a chat is written.

    Attributes:
        system: what the system says where the messages do not begin with a word of its own.
        end: what every message ends with; its first token ends an answer.
    """

    system: str
    end: str


_FIRST_SYSTEM = (
    "你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型，"  # noqa: RUF001
    "英文名叫InternVL, 是一个有用无害的人工智能助手。"
)
_CONVERSATIONS = {
    "internvl2_5": Conversation(
        "你是书生·万象，英文名是InternVL，"  # noqa: RUF001
        "是由上海人工智能实验室、清华大学及多家合作单位联合开发的多模态大语言模型。",
        "<|im_end|>\n",
    ),
    "internlm2-chat": Conversation(_FIRST_SYSTEM, "<|im_end|>"),
    "Hermes-2": Conversation(_FIRST_SYSTEM, "<|im_end|>"),
}


@dataclass(frozen=True)
class Images:
    """How a picture becomes tiles.

    Attributes:
        tile: side of a tile, in pixels.
        tokens: that a tile becomes.
        min_tiles, max_tiles: that a picture is cut into, a thumbnail of the whole not counted.
        cut: whether it is cut at all.
    """

    tile: int
    tokens: int
    min_tiles: int
    max_tiles: int
    cut: bool


def refuse_unknown(config: Mapping[str, Any]) -> None:
    """Refuse what transformers' InternVL cannot be.

    Raises:
        CheckpointError: names the key, its value and what there is.
    """
    for key, only in _ONLY.items():
        given = config.get(key, _MEANT[key])
        if given != only:
            raise _refusal(key, given, only)
    if config.get("dynamic_image_size", False) and not config.get("use_thumbnail", False):
        raise _refusal("use_thumbnail", False, True)
    if (template := config.get("template")) not in _CONVERSATIONS:
        raise _refusal("template", template, *_CONVERSATIONS)
    for part in ("llm_config", "vision_config"):
        if not isinstance(config.get(part), dict):
            raise CheckpointError(f"config.json has no {part}; copy or download it again")
    _architecture(config)
    _rope(config["llm_config"])


def conversation(config: Mapping[str, Any]) -> Conversation:
    return _CONVERSATIONS[config["template"]]


def images(config: Mapping[str, Any]) -> Images:
    vision = {**_VISION_DEFAULTS, **config["vision_config"]}
    tile = config.get("force_image_size") or vision["image_size"]
    return Images(
        tile=tile,
        tokens=int((tile // vision["patch_size"]) ** 2 * config.get("downsample_ratio", 0.5) ** 2),
        min_tiles=config.get("min_dynamic_patch", 1),
        max_tiles=config.get("max_dynamic_patch", 6),
        cut=config.get("dynamic_image_size", False),
    )


def has_packed_names(config: Mapping[str, Any]) -> bool:
    """Whether the language model's tensors have InternLM2's names, and its projections are packed."""
    return _architecture(config) == _INTERNLM2


def heads(config: Mapping[str, Any]) -> tuple[int, int]:
    """Query heads and key-value heads of the language model."""
    text = config["llm_config"]
    query = text.get("num_attention_heads", _INTERNLM2_DEFAULTS["num_attention_heads"])
    return query, text.get("num_key_value_heads") or query


def native_config(config: Mapping[str, Any], *, image_token_id: int, tied: bool) -> dict[str, Any]:
    """What config.json says, in the words of transformers' `InternVLConfig`.

    Args:
        image_token_id: of the token that a tile's outputs take the place of.
        tied: whether the output head is the embedding.

    Raises:
        CheckpointError: as `refuse_unknown`.
    """
    refuse_unknown(config)
    dtype = config.get("torch_dtype") or config.get("dtype")
    return {
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": "internvl",
        **({"dtype": dtype} if dtype else {}),
        "text_config": {**_text(config), "tie_word_embeddings": tied},
        "vision_config": _vision(config["vision_config"]),
        "image_token_id": image_token_id,
        "image_seq_length": images(config).tokens,
        "downsample_ratio": config.get("downsample_ratio", 0.5),
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": tied,
    }


def _text(config: Mapping[str, Any]) -> dict[str, Any]:
    given = config["llm_config"]
    architecture = _architecture(config)
    text = {**(_INTERNLM2_DEFAULTS if architecture == _INTERNLM2 else {}), **given}
    native = {key: text[key] for key in _TEXT_KEYS if key in text}
    native["model_type"] = _TEXT_TYPES[architecture]
    if architecture == _INTERNLM2:
        query, key_value = heads(config)
        native["num_key_value_heads"] = key_value
        native["head_dim"] = text["hidden_size"] // query
        native["attention_bias"] = text["bias"]
    native["rope_parameters"] = _rope(text)
    return native


def _rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """Position embedding. A dynamic one changes beyond `max_position_embeddings`, and no sequence gets there."""
    base = {"rope_theta": text.get("rope_theta", _INTERNLM2_DEFAULTS["rope_theta"])}
    scaling = text.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("default", "dynamic"):
        return {"rope_type": "default", **base}
    if kind == "linear":
        return {"rope_type": "linear", "factor": scaling["factor"], **base}
    raise _refusal("llm_config.rope_scaling.type", kind, "dynamic", "linear")


def _vision(given: Mapping[str, Any]) -> dict[str, Any]:
    vision = {**_VISION_DEFAULTS, **given}
    native = {key: vision[key] for key in _SAME_IN_VISION}
    return {
        "model_type": "internvl_vision",
        **native,
        "image_size": [vision["image_size"]] * 2,
        "patch_size": [vision["patch_size"]] * 2,
        "attention_bias": vision["qkv_bias"],
        "use_qk_norm": vision["qk_normalization"],
        "use_absolute_position_embeddings": True,
        # The alternative puts a norm behind the last layer, which this encoder does not have.
        "use_mean_pooling": True,
    }


def _architecture(config: Mapping[str, Any]) -> str:
    name = (config["llm_config"].get("architectures") or [""])[0]
    if name not in _TEXT_TYPES:
        raise _refusal("llm_config.architectures", name, *_TEXT_TYPES)
    return str(name)


def _refusal(key: str, given: object, *known: object) -> CheckpointError:
    there_is = ", ".join(str(value) for value in known)
    return CheckpointError(
        f"config.json has {key}={given}, and an {MODEL_TYPE} checkpoint can only be started with {there_is}; give one "
        "converted to a transformers class, on hubs often the one whose name ends in -hf"
    )
