"""Tiny models that take videos and audio, and media for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from numpy.typing import NDArray
from transformers.models.qwen2_5_omni import configuration_qwen2_5_omni as omni

from orchestrator.engine.base import Media, Request
from orchestrator.engine.models.tokenizer import byte_tokenizer, chat_template
from tests import tiny_families
from tests.tiny_families import _text
from tests.tiny_models import PLACEHOLDER, image, internvl_folder, text_config, write_folder

RATE = 16000
_EARS: dict[str, Any] = {
    "num_mel_bins": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "d_model": 32,
    "max_source_positions": 1500,
}


@dataclass(frozen=True)
class MediaFamily:
    """A family that takes more than images; `marks` has what stands for an item of each modality in a prompt."""

    name: str
    write: Callable[[Path], object]
    marks: Mapping[str, str]
    together: bool = True
    """Whether one prompt may carry several modalities."""

    def folder(self, folder: Path) -> Path:
        self.write(folder)
        return folder


def frames(seed: int, count: int = 4, width: int = 70, height: int = 56) -> NDArray[np.uint8]:
    shape = (count, height, width, 3)
    made: NDArray[np.uint8] = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return made


def sound(seed: int, seconds: float = 1.0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(int(RATE * seconds)).astype(np.float32)


def medium(modality: str, seed: int, scale: int = 1) -> Media:
    """An item; of another size for another `scale`."""
    if modality == "image":
        return Media("image", image(seed, 56 * scale, 84))
    return Media(modality, frames(seed, 3 + 2 * scale) if modality == "video" else sound(seed, 0.4 * scale))


def asking(text: str, *media: Media, **options: Any) -> Request:
    return Request("r", text, media, **{"ignore_eos": True, "chat": False, "max_tokens": 6, **options})


def qwen2_audio(folder: Path) -> None:
    tokenizer: Any = byte_tokenizer(["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"])
    make: Any = transformers.Qwen2AudioConfig
    config = make(
        audio_config=transformers.Qwen2AudioEncoderConfig(**_EARS),
        text_config=text_config("qwen2"),
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    make_extractor: Any = transformers.WhisperFeatureExtractor
    make_processor: Any = transformers.Qwen2AudioProcessor
    processor = make_processor(feature_extractor=make_extractor(feature_size=16), tokenizer=tokenizer)
    write_folder(folder, transformers.Qwen2AudioForConditionalGeneration, config, processor)


def qwen2_5_omni(folder: Path) -> None:
    """The thinker, which reads; its processor keeps three seconds of audio."""
    kinds = ("IMAGE", "AUDIO", "VIDEO")
    names = {f"{kind.lower()}_token": f"<|{kind}|>" for kind in kinds}
    names |= {f"{kind}_{end}_token": f"<|{kind}_{end}|>" for kind in ("vision", "audio") for end in ("bos", "eos")}
    tokenizer: Any = byte_tokenizer(list(names.values()), attributes=names)
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}
    vision = {"depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 64}
    make: Any = omni.Qwen2_5OmniThinkerConfig
    config = make(
        audio_config={**_EARS, "n_window": 20, "output_dim": 64},
        vision_config={**vision, "fullatt_block_indexes": [2], "patch_size": 14, "window_size": 56},
        text_config=_text(omni.Qwen2_5OmniTextConfig, rope_parameters=rope),
        **{f"{kind.lower()}_token_index": ids[f"{kind.lower()}_token"] for kind in kinds},
        audio_start_token_id=ids["audio_bos_token"],
        audio_end_token_id=ids["audio_eos_token"],
        vision_start_token_id=ids["vision_bos_token"],
        vision_end_token_id=ids["vision_eos_token"],
        user_token_id=1,
    )
    size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64}
    make_extractor: Any = transformers.WhisperFeatureExtractor
    make_image: Any = transformers.Qwen2VLImageProcessor
    make_video: Any = transformers.Qwen2VLVideoProcessor
    make_processor: Any = transformers.Qwen2_5OmniProcessor
    processor = make_processor(
        image_processor=make_image(size=size, patch_size=14),
        video_processor=make_video(size=size, patch_size=14),
        feature_extractor=make_extractor(feature_size=16, chunk_length=3),
        tokenizer=tokenizer,
        chat_template=chat_template(OMNI),
    )
    # Its class has sizes of its own, which a call would put above the parts'.
    processor.videos_kwargs = {"size": size}
    write_folder(folder, transformers.Qwen2_5OmniThinkerForConditionalGeneration, config, processor)


def _seen(kind: str) -> str:
    return f"<|vision_start|><|{kind}_pad|><|vision_end|>"


OMNI = {
    "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
    "video": "<|vision_bos|><|VIDEO|><|vision_eos|>",
    "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
}
_QWEN = {"image": _seen("image"), "video": _seen("video")}
_PLAIN = {"image": "<image>", "video": "<video>"}

MEDIA_FAMILIES = [
    MediaFamily("internvl", internvl_folder, {"image": PLACEHOLDER, "video": "<video>"}),
    MediaFamily("qwen2_vl", tiny_families.qwen2_vl, _QWEN),
    MediaFamily("qwen2_5_vl", tiny_families.qwen2_5_vl, _QWEN),
    MediaFamily("qwen3_vl", tiny_families.qwen3_vl, {"image": _seen("image"), "video": "<|video_pad|>"}),
    MediaFamily("llava_onevision", tiny_families.llava_onevision, _PLAIN),
    MediaFamily("smolvlm", tiny_families.smolvlm, _PLAIN, together=False),
    MediaFamily("qwen2_audio", qwen2_audio, {"audio": OMNI["audio"]}),
    MediaFamily("qwen2_5_omni", qwen2_5_omni, OMNI),
]
