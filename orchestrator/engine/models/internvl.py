"""InternVL from nothing: configuration, tokenizer, processor and random weights under which context matters."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from transformers import (
    GotOcr2ImageProcessor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    InternVLVisionConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from orchestrator.engine.models.tokenizer import END_OF_TURN, byte_tokenizer, chat_template, token_ids
from orchestrator.engine.models.writing import made_from, save_quietly

_TILE = 224
_PATCH = 14
_DOWNSAMPLE = 0.5
_TOKENS_PER_TILE = int((_TILE // _PATCH) ** 2 * _DOWNSAMPLE**2)
_MAX_TILES = 12
_MAX_LENGTH = 32768
_STD = 0.07
_ATTENTION_STD = 0.15
_SPOKEN = "".join(chr(code) for code in range(33, 127))
_SEED = 20240
_START, _END, _CONTEXT, _VIDEO = "<img>", "</img>", "<IMG_CONTEXT>", "<video>"


def write_tiny(folder: Path) -> None:
    """Write the embedded model's folder."""
    tokenizer = byte_tokenizer(
        [_START, _END, _CONTEXT, _VIDEO],
        attributes={
            "start_image_token": _START,
            "end_image_token": _END,
            "context_image_token": _CONTEXT,
            "video_token": _VIDEO,
        },
        max_length=_MAX_LENGTH,
    )
    _processor(tokenizer).save_pretrained(folder)
    save_quietly(_model(_config(tokenizer), _spoken_ids(tokenizer)), folder)


def _config(tokenizer: PreTrainedTokenizerFast) -> InternVLConfig:
    vision = InternVLVisionConfig(
        image_size=(_TILE, _TILE),
        patch_size=(_PATCH, _PATCH),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=6,
    )
    text = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=_MAX_LENGTH,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return InternVLConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=token_ids(tokenizer, [_CONTEXT])[0],
        image_seq_length=_TOKENS_PER_TILE,
        downsample_ratio=_DOWNSAMPLE,
        tie_word_embeddings=False,
    )


def _processor(tokenizer: PreTrainedTokenizerFast) -> InternVLProcessor:
    size = {"height": _TILE, "width": _TILE}
    return InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(size=size, crop_to_patches=True, min_patches=1, max_patches=_MAX_TILES),
        tokenizer=tokenizer,
        video_processor=InternVLVideoProcessor(size=size),
        image_seq_length=_TOKENS_PER_TILE,
        chat_template=chat_template({"image": f"{_CONTEXT}\n", "video": f"{_VIDEO}\n"}),
    )


def _spoken_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The tokens that answers are made of: visible ASCII and the end of a turn."""
    return token_ids(tokenizer, [*_SPOKEN, END_OF_TURN])


@torch.no_grad()
def _model(config: InternVLConfig, spoken: list[int]) -> InternVLForConditionalGeneration:
    """Random matrices under which the next token depends on the context; all else as the architecture starts.

    Queries and keys are spread more widely than the rest: attention that is nearly even over hundreds of image tokens
    would answer everything with one token, and hide a cache that gives back the wrong entry.
    """
    model = cast(InternVLForConditionalGeneration, made_from(InternVLForConditionalGeneration, config, torch.float32))
    generator = torch.Generator().manual_seed(_SEED)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            sharp = "language_model" in name and ("q_proj" in name or "k_proj" in name)
            parameter.normal_(0.0, _ATTENTION_STD if sharp else _STD, generator=generator)
    silent = torch.ones(model.lm_head.weight.shape[0], dtype=torch.bool)
    silent[spoken] = False
    model.lm_head.weight[silent] = 0.0
    return model
