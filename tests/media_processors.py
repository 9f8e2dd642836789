"""Processors of every family with the settings of real models, over a byte tokenizer.

Real settings: InternVL2.5, Qwen2.5-VL, LLaVA-OneVision. The others have transformers' defaults, but for what is named
here: Qwen2-VL has the caps of Qwen2.5-VL, Gemma3 squares of 896 pixels, Qwen3-VL the caps of its published model,
Qwen2.5-Omni a window of 300 s, both audio models 128 mel bins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.video_utils import VideoMetadata

from orchestrator.engine.models.tokenizer import byte_tokenizer

T: Any = transformers
RATE = 16000


@dataclass(frozen=True)
class RealSize:
    """A family: its processor, and what stands for an item of each modality in a prompt."""

    name: str
    make: Callable[[], Any]
    marks: dict[str, str]


def _internvl() -> Any:
    names = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    size = {"height": 448, "width": 448}
    return T.InternVLProcessor(
        image_processor=T.GotOcr2ImageProcessor(size=size, crop_to_patches=True, min_patches=1, max_patches=12),
        tokenizer=byte_tokenizer(list(names.values()), attributes=names),
        video_processor=T.InternVLVideoProcessor(size=size),
        image_seq_length=256,
    )


def _qwen(name: str, videos: str, patch: int, image: dict[str, int], video: dict[str, int] | None) -> Any:
    marks = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
    # None is the same cap as False, and warns.
    options: dict[str, Any] = {"patch_size": patch, "cap_pixels_per_frame": False}
    return getattr(T, f"{name}Processor")(
        image_processor=T.Qwen2VLImageProcessor(size=image, patch_size=patch),
        tokenizer=byte_tokenizer(list(marks)),
        video_processor=getattr(T, f"{videos}VideoProcessor")(**options, **({"size": video} if video else {})),
    )


def _qwen2_vl() -> Any:
    return _qwen("Qwen2VL", "Qwen2VL", 14, {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16384}, None)


def _qwen2_5_vl() -> Any:
    return _qwen("Qwen2_5_VL", "Qwen2VL", 14, {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16384}, None)


def _qwen3_vl() -> Any:
    image = {"shortest_edge": 65536, "longest_edge": 16777216}
    return _qwen("Qwen3VL", "Qwen3VL", 16, image, {"shortest_edge": 4096, "longest_edge": 25165824})


def _llava_onevision() -> Any:
    size = {"height": 384, "width": 384}
    return T.LlavaOnevisionProcessor(
        image_processor=T.LlavaOnevisionImageProcessor(size=size),
        tokenizer=byte_tokenizer(["<image>", "<video>"]),
        video_processor=T.LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=729,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_9",
    )


def _smol(name: str) -> Any:
    rows = [f"<row_{row}_col_{column}>" for row in range(1, 12) for column in range(1, 12)]
    marks = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", "<video>"]
    parts = {"image_processor": getattr(T, f"{name}ImageProcessor")()}
    if name == "SmolVLM":
        side = {"longest_edge": 364}
        parts["video_processor"] = T.SmolVLMVideoProcessor(size=side, max_image_size=side, num_frames=64, fps=1)
    return getattr(T, f"{name}Processor")(tokenizer=byte_tokenizer([*marks, *rows]), image_seq_len=169, **parts)


def _smolvlm() -> Any:
    return _smol("SmolVLM")


def _idefics3() -> Any:
    return _smol("Idefics3")


def _gemma3() -> Any:
    names = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    return T.Gemma3Processor(
        image_processor=T.Gemma3ImageProcessor(size={"height": 896, "width": 896}),
        tokenizer=byte_tokenizer(list(names.values()), attributes=names),
        image_seq_length=256,
    )


def _qwen2_audio() -> Any:
    return T.Qwen2AudioProcessor(
        feature_extractor=T.WhisperFeatureExtractor(feature_size=128),
        tokenizer=byte_tokenizer(["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]),
    )


def _qwen2_5_omni() -> Any:
    names = {
        "image_token": "<|IMAGE|>",
        "audio_token": "<|AUDIO|>",
        "video_token": "<|VIDEO|>",
        "vision_bos_token": "<|vision_bos|>",
        "vision_eos_token": "<|vision_eos|>",
        "audio_bos_token": "<|audio_bos|>",
        "audio_eos_token": "<|audio_eos|>",
    }
    size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16384}
    return T.Qwen2_5OmniProcessor(
        image_processor=T.Qwen2VLImageProcessor(size=size),
        video_processor=T.Qwen2VLVideoProcessor(cap_pixels_per_frame=False),
        feature_extractor=T.WhisperFeatureExtractor(feature_size=128, chunk_length=300),
        tokenizer=byte_tokenizer(list(names.values()), attributes=names),
    )


_QWEN_MARKS = {"image": "<|image_pad|>", "video": "<|video_pad|>"}

REAL_SIZE = [
    RealSize("internvl", _internvl, {"image": "<IMG_CONTEXT>", "video": "<video>"}),
    RealSize("qwen2_vl", _qwen2_vl, _QWEN_MARKS),
    RealSize("qwen2_5_vl", _qwen2_5_vl, _QWEN_MARKS),
    RealSize("qwen3_vl", _qwen3_vl, _QWEN_MARKS),
    RealSize("llava_onevision", _llava_onevision, {"image": "<image>", "video": "<video>"}),
    RealSize("smolvlm", _smolvlm, {"image": "<image>", "video": "<video>"}),
    RealSize("idefics3", _idefics3, {"image": "<image>"}),
    RealSize("gemma3", _gemma3, {"image": "<start_of_image>"}),
    RealSize("qwen2_audio", _qwen2_audio, {"audio": "<|AUDIO|>"}),
    RealSize("qwen2_5_omni_thinker", _qwen2_5_omni, {"image": "<|IMAGE|>", "video": "<|VIDEO|>", "audio": "<|AUDIO|>"}),
]


def processed(processor: Any, modality: str, mark: str, data: Any) -> dict[str, torch.Tensor]:
    """One item through the processor, frames as they are."""
    options: dict[str, Any] = {}
    if modality == "video":
        frames = len(data)
        metadata = VideoMetadata(
            total_num_frames=frames,
            fps=2.0,
            width=data[0].shape[1],
            height=data[0].shape[0],
            duration=frames / 2,
            frames_indices=list(range(frames)),
        )
        options["videos_kwargs"] = {"do_sample_frames": False, "video_metadata": [metadata]}
    if modality == "audio":
        options["audio_kwargs"] = {"sampling_rate": RATE}
    key = {"image": "images", "video": "videos", "audio": "audio"}[modality]
    made: dict[str, torch.Tensor] = processor(text=[mark], return_tensors="pt", **{key: [data]}, **options)
    return made


def embed_tokens(processor: Any, modality: str, mark: str, made: dict[str, torch.Tensor]) -> int:
    """How many of the ids stand for encoder outputs."""
    mark = {"<start_of_image>": "<image_soft_token>"}.get(mark, mark)
    if mark == "<video>" and hasattr(processor, "image_seq_len"):
        mark = "<image>"
    if mark == "<video>" and hasattr(processor, "start_image_token"):
        mark = "<IMG_CONTEXT>"
    return int((made["input_ids"] == processor.tokenizer.convert_tokens_to_ids(mark)).sum())


def random_item(modality: str, shape: tuple[int, ...], seed: int) -> Any:
    drawn = np.random.default_rng(seed)
    if modality == "audio":
        return drawn.standard_normal(shape[0]).astype(np.float32)
    if modality == "image":
        return Image.fromarray(drawn.integers(0, 255, (shape[1], shape[0], 3), dtype=np.uint8))
    return drawn.integers(0, 255, (shape[0], shape[2], shape[1], 3), dtype=np.uint8)
