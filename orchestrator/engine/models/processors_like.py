"""Tokenizers and processors of real models with their real settings, made without a hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers

from orchestrator.engine.models.tokenizer import END_OF_TEXT, END_OF_TURN, START_OF_TURN, chat_template
from orchestrator.engine.models.tokenizer_like import Likeness, tokenizer_like

_IMAGENET: dict[str, Any] = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
_CLIP: dict[str, Any] = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_SIGLIP: dict[str, Any] = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_FIRST_OF_QWEN = 151643
_QWEN = (END_OF_TEXT, START_OF_TURN, END_OF_TURN)
_QWEN_VL = (
    *("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)


def write_internvl2_5(folder: Path, vocab_size: int) -> None:
    """InternVL 2.5 over InternLM2: up to 12 tiles of 448 x 448 and a thumbnail, 256 tokens each."""
    names = ("<|im_end|>", "<|im_start|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>")
    special = {"<unk>": 0, "<s>": 1, "</s>": 2, **{name: 92542 + place for place, name in enumerate(names)}}
    attributes = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tokenizer = tokenizer_like(
        Likeness(vocab_size, special, "</s>", "</s>", 32768, first_byte_id=3, leading="<s>", attributes=attributes)
    )
    size = {"height": 448, "width": 448}
    make: Any = transformers.InternVLProcessor
    processor = make(
        image_processor=transformers.GotOcr2ImageProcessor(
            size=size, crop_to_patches=True, min_patches=1, max_patches=12, **_IMAGENET
        ),
        tokenizer=tokenizer,
        video_processor=transformers.InternVLVideoProcessor(size=size, **_IMAGENET),
        image_seq_length=256,
        chat_template=chat_template({"image": "<IMG_CONTEXT>\n", "video": "<video>\n"}),
    )
    _write(folder, processor, eos=[92542, 92543])


def write_qwen2_5_vl(folder: Path, vocab_size: int) -> None:
    """Qwen2.5-VL: a token for 28 x 28 pixels, images of up to 12,845,056 pixels."""
    tokenizer = _qwen_tokenizer(vocab_size, [*_QWEN, *_QWEN_VL], max_length=131072)
    make: Any = transformers.Qwen2_5_VLProcessor
    size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16384}
    processor = make(
        image_processor=transformers.Qwen2VLImageProcessor(size=size, **_CLIP),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen2VLVideoProcessor(**_CLIP),
        chat_template=chat_template(
            {kind: f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video")}
        ),
    )
    _write(folder, processor, eos=[151645, 151643])


def write_llava_onevision(folder: Path, vocab_size: int) -> None:
    """LLaVA-OneVision over Qwen2: tiles of 384 x 384, thinned out above nine tiles' worth."""
    tokenizer = _qwen_tokenizer(vocab_size, [*_QWEN, "<image>", "<video>"], max_length=32768)
    size = {"height": 384, "width": 384}
    make: Any = transformers.LlavaOnevisionProcessor
    processor = make(
        image_processor=transformers.LlavaOnevisionImageProcessor(size=size, **_SIGLIP),
        tokenizer=tokenizer,
        video_processor=transformers.LlavaOnevisionVideoProcessor(size=size, **_SIGLIP),
        num_image_tokens=729,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_9",
        chat_template=chat_template({"image": "<image>\n", "video": "<video>\n"}),
    )
    _write(folder, processor, eos=[151645, 151643])


def write_qwen2_audio(folder: Path, vocab_size: int) -> None:
    """Qwen2-Audio: a token for 40 ms of a recording, of which the processor takes 30 s."""
    marks = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    tokenizer = _qwen_tokenizer(vocab_size, [*_QWEN, *marks], max_length=8192)
    make: Any = transformers.Qwen2AudioProcessor
    make_ears: Any = transformers.WhisperFeatureExtractor
    processor = make(
        feature_extractor=make_ears(feature_size=128),
        tokenizer=tokenizer,
        chat_template=chat_template({"audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"}),
    )
    _write(folder, processor, eos=[151645, 151643])


def write_opt(folder: Path, vocab_size: int) -> None:
    """OPT: text only, no chat template; every text begins with the token that also ends one."""
    special = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    tokenizer = tokenizer_like(Likeness(vocab_size, special, "</s>", "<pad>", 2048, first_byte_id=4, leading="</s>"))
    _write(folder, tokenizer, eos=[2])


def _qwen_tokenizer(vocab_size: int, special: Sequence[str], max_length: int) -> Any:
    places = {name: _FIRST_OF_QWEN + place for place, name in enumerate(special)}
    return tokenizer_like(Likeness(vocab_size, places, END_OF_TURN, END_OF_TEXT, max_length))


def _write(folder: Path, processor: Any, eos: list[int]) -> None:
    processor.save_pretrained(folder)
    make: Any = transformers.GenerationConfig
    make(eos_token_id=eos).save_pretrained(folder)
