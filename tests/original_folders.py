"""Tiny model folders in the layout that OpenGVLab published InternVL in, and the same model in transformers' class."""

from __future__ import annotations

import io
import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from orchestrator.engine.models.tokenizer import byte_tokenizer

ROOT = Path(__file__).resolve().parent.parent
MARKS = ("<img>", "</img>", "<IMG_CONTEXT>", "<quad>", "</quad>", "<ref>", "</ref>", "<box>", "</box>")
TURNS = ("<|plugin|>", "<|interpreter|>", "<|action_end|>", "<|action_start|>", "<|im_end|>", "<|im_start|>")
CHINESE = "你是书生·万象，英文名是InternVL，多模态大语言模型。"  # noqa: RUF001
TILE, PATCH = 56, 14
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "norm_type": "layer_norm",
    "layer_norm_eps": 1e-06,
}


@dataclass(frozen=True)
class Pair:
    """One model twice.

    Attributes:
        original: the folder in the published layout.
        model: the same weights in transformers' class.
        sentencepiece: the tokenizer's own library on its file; None for a byte-level tokenizer.
    """

    original: Path
    model: Any
    sentencepiece: Any = None


def internlm2_pair(folder: Path, *, vision: dict[str, Any] | None = None, bias: bool = False) -> Pair:
    """Over InternLM2: packed projections, a SentencePiece tokenizer whose last pieces are special tokens."""
    folder.mkdir(parents=True)
    pieces = _sentencepiece(folder)
    count = pieces.get_piece_size()
    names = [*TURNS, *MARKS]
    first = count - len(TURNS)
    write_internlm2_tokenizer(folder, {first + place: name for place, name in enumerate(names)})
    text = {**_TEXT, "vocab_size": first + len(names), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = {
        **_config(text, "InternLM2ForCausalLM", {**_VISION, **(vision or {})}),
        "torch_dtype": "float32",
    }
    config["llm_config"] |= {
        "bias": bias,
        "rope_theta": 1000000,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
        "model_type": "internlm2",
    }
    _dump(folder / "config.json", config)
    _dump(folder / "generation_config.json", {"eos_token_id": [first + 4, first + 5]})
    rope = {"rope_type": "default", "rope_theta": 1000000}
    native = transformers.LlamaConfig(**text, head_dim=8, attention_bias=bias, rope_parameters=rope)
    model = _model(native, config, image_token_id=first + len(TURNS) + 2)
    _save(folder, published(model, packed=True))
    return Pair(folder, model, pieces)


def qwen2_pair(folder: Path, *, tied: bool = False) -> Pair:
    """Over Qwen2: names as transformers has them under a prefix, a byte-level tokenizer in the files of its time."""
    folder.mkdir(parents=True)
    vocabulary = byte_tokenizer([]).get_vocab()
    letters = {token: place for token, place in vocabulary.items() if place < 256}
    added = {name: 256 + place for place, name in enumerate(("<|endoftext|>", *TURNS[:-3:-1], *MARKS))}
    _dump(folder / "vocab.json", letters)
    (folder / "merges.txt").write_text("#version: 0.2\n")
    _dump(folder / "added_tokens.json", added)
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    _dump(folder / "special_tokens_map.json", {**special, "additional_special_tokens": list(MARKS)})
    settings = {"tokenizer_class": "Qwen2Tokenizer", "model_max_length": 8192, "add_prefix_space": False, **special}
    _dump(folder / "tokenizer_config.json", settings)
    text = {**_TEXT, "vocab_size": 280, "bos_token_id": 256, "eos_token_id": added["<|im_end|>"]}
    config = _config(text, "Qwen2ForCausalLM", _VISION)
    config["llm_config"] |= {"model_type": "qwen2", "tie_word_embeddings": tied}
    _dump(folder / "config.json", config)
    model = _model(
        transformers.Qwen2Config(**text, tie_word_embeddings=tied), config, added["<IMG_CONTEXT>"], tied=tied
    )
    _save(folder, published(model, packed=False))
    return Pair(folder, model)


def _config(text: dict[str, Any], architecture: str, vision: dict[str, Any]) -> dict[str, Any]:
    code = "configuration_internvl_chat.InternVLChatConfig"
    return {
        "architectures": ["InternVLChatModel"],
        "auto_map": {"AutoConfig": code, "AutoModel": "modeling_internvl_chat.InternVLChatModel"},
        "downsample_ratio": 0.5,
        "dynamic_image_size": True,
        "force_image_size": TILE,
        "llm_config": {**text, "architectures": [architecture]},
        "max_dynamic_patch": 12,
        "min_dynamic_patch": 1,
        "model_type": "internvl_chat",
        "pad2square": False,
        "ps_version": "v2",
        "select_layer": -1,
        "template": "internvl2_5",
        "torch_dtype": "float32",
        "use_backbone_lora": 0,
        "use_llm_lora": 0,
        "use_thumbnail": True,
        "vision_config": {
            "architectures": ["InternVisionModel"],
            "model_type": "intern_vit_6b",
            "image_size": TILE,
            "patch_size": PATCH,
            "num_channels": 3,
            "qkv_bias": True,
            "qk_normalization": False,
            **vision,
        },
    }


def _model(text: Any, config: dict[str, Any], image_token_id: int, *, tied: bool = False) -> Any:
    given = config["vision_config"]
    vision = transformers.InternVLVisionConfig(
        image_size=(TILE, TILE),
        patch_size=(PATCH, PATCH),
        attention_bias=given["qkv_bias"],
        use_qk_norm=given["qk_normalization"],
        **{key: given[key] for key in _VISION},
    )
    whole = transformers.InternVLConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=image_token_id,
        image_seq_length=4,
        downsample_ratio=0.5,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    make: Any = transformers.InternVLForConditionalGeneration
    model = make._from_config(whole, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


_NAMES = (
    ("model.vision_tower.embeddings.cls_token", "vision_model.embeddings.class_embedding"),
    ("model.vision_tower.embeddings.position_embeddings", "vision_model.embeddings.position_embedding"),
    ("model.vision_tower.embeddings.patch_embeddings.projection", "vision_model.embeddings.patch_embedding"),
    ("model.vision_tower.encoder.layer", "vision_model.encoder.layers"),
    ("attention.projection_layer", "attn.proj"),
    ("attention.q_norm", "attn.q_norm"),
    ("attention.k_norm", "attn.k_norm"),
    ("layernorm_before", "norm1"),
    ("layernorm_after", "norm2"),
    ("lambda_", "ls"),
    ("model.multi_modal_projector.layer_norm", "mlp1.0"),
    ("model.multi_modal_projector.linear_1", "mlp1.1"),
    ("model.multi_modal_projector.linear_2", "mlp1.3"),
)
_PACKED_NAMES = (
    ("lm_head", "language_model.output"),
    ("model.language_model.embed_tokens", "language_model.model.tok_embeddings"),
    ("model.language_model", "language_model.model"),
    ("self_attn.o_proj", "attention.wo"),
    ("mlp.gate_proj", "feed_forward.w1"),
    ("mlp.down_proj", "feed_forward.w2"),
    ("mlp.up_proj", "feed_forward.w3"),
    ("post_attention_layernorm", "ffn_norm"),
    ("input_layernorm", "attention_norm"),
)
_PLAIN_NAMES = (("lm_head", "language_model.lm_head"), ("model.language_model", "language_model.model"))


def published(model: Any, *, packed: bool) -> dict[str, torch.Tensor]:
    """The tensors of a model, which may be on meta, under the names and in the packing of the published layout."""
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    found: dict[str, torch.Tensor] = {}
    groups = model.config.text_config.num_key_value_heads
    for name, tensor in tensors.items():
        vision = "vision_tower" in name
        if re.search("(k|v)_proj", name) and (vision or packed):
            continue
        if "q_proj" in name and (vision or packed):
            three = [tensors[name.replace("q_proj", f"{letter}_proj")] for letter in "qkv"]
            parts = [part.reshape(1 if vision else groups, -1, *part.shape[1:]) for part in three]
            tensor = torch.cat(parts, dim=1).reshape(-1, *tensor.shape[1:])
            old = "attention.q_proj" if vision else "self_attn.q_proj"
            name = name.replace(old, "attn.qkv" if vision else "attention.wqkv")
        for old, new in (*_NAMES, *(_PACKED_NAMES if packed else _PLAIN_NAMES)):
            name = name.replace(old, new)
        found[name] = tensor.contiguous().clone()
    return found


def _save(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """In two shards."""
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in shards.items() for name in part}
    _dump(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _sentencepiece(folder: Path) -> Any:
    import sentencepiece

    lines = [*(ROOT / "LICENSE").read_text().splitlines(), *(ROOT / "README.md").read_text().splitlines(), CHINESE]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in lines if line.strip()]),
        model_writer=model,
        vocab_size=800,
        model_type="bpe",
        byte_fallback=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    data = model.getvalue() + b"".join(_piece(f"[UNUSED_TOKEN_{place}]") for place in range(len(TURNS)))
    (folder / "tokenizer.model").write_bytes(data)
    return sentencepiece.SentencePieceProcessor(model_proto=data)


def _piece(text: str) -> bytes:
    """One more piece of a model, which no text is made of: what is written behind it belongs to the same list."""
    name = text.encode()
    fields = bytes([0x0A, len(name)]) + name + b"\x15" + struct.pack("<f", -1e6)
    return bytes([0x0A, len(fields)]) + fields


def write_internlm2_tokenizer(folder: Path, names: dict[int, str]) -> None:
    tokens = {0: "<unk>", 1: "<s>", 2: "</s>", **names}
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    _dump(
        folder / "tokenizer_config.json",
        {
            "added_tokens_decoder": {str(place): {"content": name, **flags} for place, name in tokens.items()},
            "additional_special_tokens": list(names.values()),
            "auto_map": {"AutoTokenizer": ["tokenization_internlm2.InternLM2Tokenizer", None]},
            "bos_token": "<s>",
            "chat_template": "{{ bos_token }}",
            "eos_token": "</s>",
            "model_max_length": 8192,
            "pad_token": "</s>",
            "tokenizer_class": "InternLM2Tokenizer",
            "unk_token": "<unk>",
        },
    )
    (folder / "tokenization_internlm2.py").write_text("raise SystemExit('code of the checkpoint was run')\n")
    (folder / "configuration_internvl_chat.py").write_text("raise SystemExit('code of the checkpoint was run')\n")


def _dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
