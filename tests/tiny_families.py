"""One tiny model of each family as a real model folder, processor included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from orchestrator.engine.models.tokenizer import byte_tokenizer, chat_template
from tests.tiny_models import VOCABULARY, text_config, text_folder, write_folder

QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


@dataclass(frozen=True)
class Family:
    """A family of models that take images: how its folder is made, and what stands for an image in a prompt."""

    name: str
    write: Callable[[Path], None]
    image: str

    def folder(self, folder: Path) -> Path:
        self.write(folder)
        return folder


def _text(config_class: Any, **changes: Any) -> dict[str, Any]:
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": 258,
        "pad_token_id": 256,
    }
    settings: dict[str, Any] = config_class(**{**shape, **changes}).to_dict()
    return settings


def _vision(config_class: Any, **changes: Any) -> dict[str, Any]:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings: dict[str, Any] = config_class(**{**shape, "image_size": 56, "patch_size": 14, **changes}).to_dict()
    return settings


def _qwen(folder: Path, name: str, vision: dict[str, Any], text: dict[str, Any], patch: int) -> None:
    tokenizer = byte_tokenizer(QWEN_TOKENS)
    make = {
        part: getattr(transformers, f"{name}{part}") for part in ("Config", "Processor", "ForConditionalGeneration")
    }
    ids = {
        f"{field}_token_id": tokenizer.convert_tokens_to_ids(token)
        for field, token in zip(
            ("vision_start", "vision_end", "image", "video"),
            ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
            strict=True,
        )
    }
    side = 2 * patch
    size = {"shortest_edge": 4 * side * side, "longest_edge": 64 * side * side}
    config = make["Config"](vision_config=vision, text_config=text, **ids)
    videos = transformers.Qwen3VLVideoProcessor if name == "Qwen3VL" else transformers.Qwen2VLVideoProcessor
    make_image: Any = transformers.Qwen2VLImageProcessor
    make_video: Any = videos
    processor = make["Processor"](
        image_processor=make_image(size=size, patch_size=patch),
        tokenizer=tokenizer,
        video_processor=make_video(size=size, patch_size=patch),
        chat_template=chat_template({"image": QWEN_IMAGE}),
    )
    write_folder(folder, make["ForConditionalGeneration"], config, processor)


def qwen2_vl(folder: Path) -> None:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2, "patch_size": 14}
    _qwen(folder, "Qwen2VL", vision, _text(transformers.Qwen2VLTextConfig, rope_parameters=rope), 14)


def qwen2_5_vl(folder: Path) -> None:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 4,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [2],
        "patch_size": 14,
        "window_size": 56,
    }
    _qwen(folder, "Qwen2_5_VL", vision, _text(transformers.Qwen2_5_VLTextConfig, rope_parameters=rope), 14)


def qwen3_vl(folder: Path) -> None:
    rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True, "rope_theta": 5e6}
    vision = {
        "depth": 4,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 4,
        "out_hidden_size": 64,
        "patch_size": 16,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [1, 2],
    }
    text = _text(transformers.Qwen3VLTextConfig, head_dim=16, rope_parameters=rope)
    _qwen(folder, "Qwen3VL", vision, text, 16)


def llava_onevision(folder: Path) -> None:
    tokenizer: Any = byte_tokenizer(["<image>", "<video>"])
    grid = [[height * 56, width * 56] for height in (1, 2, 3) for width in (1, 2, 3)]
    config = transformers.LlavaOnevisionConfig(
        vision_config=_vision(transformers.SiglipVisionConfig, vision_use_head=False),
        text_config=text_config("qwen2").to_dict(),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=grid,
        vision_aspect_ratio="anyres_max_9",
    )
    size = {"height": 56, "width": 56}
    make: Any = transformers.LlavaOnevisionProcessor
    processor = make(
        image_processor=transformers.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=grid),
        tokenizer=tokenizer,
        video_processor=transformers.LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=chat_template({"image": "<image>\n"}),
    )
    write_folder(folder, transformers.LlavaOnevisionForConditionalGeneration, config, processor)


def _smol(folder: Path, name: str) -> None:
    rows = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    marks = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", "<video>"]
    tokenizer = byte_tokenizer([*marks, *rows])
    config = getattr(transformers, f"{name}Config")(
        vision_config=_vision(getattr(transformers, f"{name}VisionConfig")),
        text_config=_text(transformers.LlamaConfig),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=tokenizer.pad_token_id,
    )
    size = {"size": {"longest_edge": 224}, "max_image_size": {"longest_edge": 56}}
    parts = {"image_processor": getattr(transformers, f"{name}ImageProcessor")(**size, do_image_splitting=True)}
    if name == "SmolVLM":
        small = {"longest_edge": 56}
        make_video: Any = transformers.SmolVLMVideoProcessor
        parts["video_processor"] = make_video(size=small, max_image_size=small, num_frames=8, fps=1)
    processor = getattr(transformers, f"{name}Processor")(
        tokenizer=tokenizer, image_seq_len=4, chat_template=chat_template({"image": "<image>"}), **parts
    )
    write_folder(folder, getattr(transformers, f"{name}ForConditionalGeneration"), config, processor)


def smolvlm(folder: Path) -> None:
    _smol(folder, "SmolVLM")


def idefics3(folder: Path) -> None:
    _smol(folder, "Idefics3")


def gemma3(folder: Path) -> None:
    """Two of its three layers attend on 32 tokens."""
    names = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tokenizer: Any = byte_tokenizer(list(names.values()), attributes=names)
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    text = _text(transformers.Gemma3TextConfig, head_dim=16, sliding_window=32, layer_types=layers)
    config = transformers.Gemma3Config(
        vision_config=_vision(transformers.SiglipVisionConfig, vision_use_head=False),
        text_config=text,
        mm_tokens_per_image=16,
        image_token_index=tokenizer.image_token_id,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
    )
    make: Any = transformers.Gemma3Processor
    processor = make(
        image_processor=transformers.Gemma3ImageProcessor(size={"height": 56, "width": 56}),
        tokenizer=tokenizer,
        image_seq_length=16,
        chat_template=chat_template({"image": "<start_of_image>"}),
    )
    write_folder(folder, transformers.Gemma3ForConditionalGeneration, config, processor)


def llava(folder: Path) -> None:
    """Nothing in the engine knows this one: it follows transformers' conventions."""
    tokenizer: Any = byte_tokenizer(["<image>"])
    config = transformers.LlavaConfig(
        vision_config=_vision(transformers.CLIPVisionConfig, projection_dim=32),
        text_config=_text(transformers.LlamaConfig),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
    )
    make: Any = transformers.LlavaProcessor
    size = {"height": 56, "width": 56}
    processor = make(
        image_processor=transformers.CLIPImageProcessor(size={"shortest_edge": 56}, crop_size=size),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=chat_template({"image": "<image>"}),
    )
    write_folder(folder, transformers.LlavaForConditionalGeneration, config, processor)


FAMILIES = [
    Family("qwen2_vl", qwen2_vl, QWEN_IMAGE),
    Family("qwen2_5_vl", qwen2_5_vl, QWEN_IMAGE),
    Family("qwen3_vl", qwen3_vl, QWEN_IMAGE),
    Family("llava_onevision", llava_onevision, "<image>"),
    Family("smolvlm", smolvlm, "<image>"),
    Family("idefics3", idefics3, "<image>"),
    Family("gemma3", gemma3, "<start_of_image>"),
    Family("llava", llava, "<image>"),
]


def text_only(folder: Path, name: str) -> Path:
    """A text model of a family: `llama`, `opt`, `mistral` or `qwen2` with a window of 32 tokens, or `gemma3_text`."""
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "llama": (transformers.LlamaConfig, {}),
        "mistral": (transformers.MistralConfig, {"sliding_window": 32}),
        "qwen2": (transformers.Qwen2Config, {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}),
        "gemma3_text": (transformers.Gemma3TextConfig, {"sliding_window": 32, "head_dim": 16}),
        "opt": (transformers.OPTConfig, {"ffn_dim": 128, "word_embed_proj_dim": 64}),
    }
    make, changes = kinds[name]
    settings = _text(make, **changes)
    if name == "opt":
        settings = {key: value for key, value in settings.items() if key not in ("num_key_value_heads",)}
    return text_folder(folder, config=make(**settings))
