"""Tiny models of a few layers as real model folders, and engines on them; for the tests of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image

from orchestrator.config import Config
from orchestrator.device.cpu import CpuDevice
from orchestrator.engine.attention.reference import ReferenceAttention
from orchestrator.engine.base import Media, Output, Request
from orchestrator.engine.models.tokenizer import byte_tokenizer, chat_template
from orchestrator.engine.transformers import TransformersEngine
from orchestrator.engine.weights.dummy import DummyLoader
from orchestrator.engine.weights.safetensors import SafetensorsLoader
from orchestrator.events import SilentEvents

VOCABULARY = 512
TILE_TOKENS = 4
PLACEHOLDER = "<IMG_CONTEXT>"


def text_config(family: str) -> Any:
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": 258,
    }
    return (transformers.LlamaConfig if family == "llama" else transformers.Qwen2Config)(**shape)


def text_folder(folder: Path, *, config: Any = None) -> Path:
    """A text model."""
    tokenizer = byte_tokenizer([])
    tokenizer.chat_template = chat_template({})
    config = config or text_config("llama")
    write_folder(folder, transformers.AutoModelForCausalLM._model_mapping[type(config)], config, tokenizer)
    return folder


def internvl_folder(folder: Path, *, family: str = "llama") -> Path:
    """An InternVL whose tiles have four tokens."""
    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": PLACEHOLDER,
        "video_token": "<video>",
    }
    tokenizer: Any = byte_tokenizer(list(named.values()), attributes=named)
    vision = transformers.InternVLVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=(56, 56),
        patch_size=(14, 14),
    )
    config = transformers.InternVLConfig(
        vision_config=vision,
        text_config=text_config(family),
        image_token_id=tokenizer.context_image_token_id,
        image_seq_length=TILE_TOKENS,
        downsample_ratio=0.5,
    )
    size = {"height": 56, "width": 56}
    make: Any = transformers.InternVLProcessor
    processor = make(
        image_processor=transformers.GotOcr2ImageProcessor(
            size=size, crop_to_patches=True, min_patches=1, max_patches=12
        ),
        tokenizer=tokenizer,
        video_processor=transformers.InternVLVideoProcessor(size=size),
        image_seq_length=TILE_TOKENS,
        chat_template=chat_template({"image": f"{PLACEHOLDER}\n", "video": "<video>\n"}),
    )
    write_folder(folder, transformers.InternVLForConditionalGeneration, config, processor)
    return folder


def write_folder(folder: Path, model_class: Any, config: Any, processor: Any) -> None:
    torch.manual_seed(0)
    model = model_class._from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.08)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def make_config(folder: Path, **changes: Any) -> Config:
    """A configuration for a model folder; `changes` are nodes to update, such as `scheduler={"max_num_seqs": 2}`."""
    values: dict[str, Any] = {
        "model": {
            "name": "tiny",
            "path": str(folder),
            "revision": None,
            "dtype": "auto",
            "load_format": "auto",
            "trust_remote_code": False,
            "profiler": "auto",
        },
        "device": {"kind": "cpu"},
        "gpu": {"util": 0.9, "index": 0, "total_bytes": None, "spec": None},
        "scheduler": {"max_model_len": "auto", "max_num_seqs": 4, "max_num_batched_tokens": 256},
        "mm": {
            "limit_per_prompt": {"image": 3, "video": 0, "audio": 0},
            "image": {"max_size": None},
            "video": {"max_frames": None, "max_size": None},
            "audio": {"max_seconds": None},
            "processor_kwargs": {},
        },
        "encoder": {"compute_budget": "auto", "cache_size": "auto", "micro_batch": "auto"},
        "kv": {"block_size": 16, "dtype": "auto", "bytes": "need"},
        "graphs": {"mode": "none", "sizes": "auto"},
        "engine": {"name": "transformers", "attention": "auto", "tensor_parallel_size": 1},
        "weights": {"loader": "auto", "io": "auto", "threads": "auto", "chunk_bytes": "auto"},
        "startup_plan": "off",
        "cache": {"dir": str(folder / "cache"), "max_bytes": 1 << 20, "enabled": False},
        "stages": {},
        "run": {"dir": None, "seed": 0, "skip_existing": False},
        "log": {"json": False},
    }
    for node, update in changes.items():
        values[node] = {**values[node], **update}
    return Config.model_validate(values)


def resolve(group: str, name: str) -> Any:
    """The plugins that an engine asks for."""
    return {
        ("attention", "reference"): ReferenceAttention,
        ("loaders", "safetensors"): SafetensorsLoader,
        ("loaders", "dummy"): DummyLoader,
    }[group, name]


def make_engine(
    folder: Path, *, blocks: int = 64, encoder_tokens: int = 256, load: bool = True, **changes: Any
) -> TransformersEngine:
    """An engine that has its weights, encoder cache and KV cache."""
    config = make_config(folder, **changes)
    engine = TransformersEngine(config, CpuDevice(), resolve, None)
    if load:
        engine.load(SilentEvents())
        engine.reserve_encoder_cache(encoder_tokens)
        engine.allocate_kv(blocks)
    return engine


def image(seed: int, width: int = 56, height: int = 56) -> Image.Image:
    pixels = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(pixels.numpy())


def request(text: str, *images: Image.Image, name: str = "r", **options: Any) -> Request:
    """A request whose output does not end by itself, unless told otherwise."""
    return Request(name, text, tuple(Media("image", picture) for picture in images), **{"ignore_eos": True, **options})


def alone(model: Any, processor: Any, asked: Request, prompt: str) -> list[int]:
    """The tokens of `generate` of transformers on one request."""
    pictures = [media.data for media in asked.media]
    batch = processor(text=[prompt], images=pictures, return_tensors="pt") if pictures else _text(processor, prompt)
    make: Any = transformers.GenerationConfig
    settings = make(
        max_new_tokens=asked.max_tokens,
        do_sample=False,
        pad_token_id=256,
        eos_token_id=None if asked.ignore_eos else 258,
    )
    model.generation_config.eos_token_id = settings.eos_token_id
    ids = model.generate(**batch, generation_config=settings)
    tokens: list[int] = ids[0, batch["input_ids"].shape[1] :].tolist()
    return tokens


def _text(processor: Any, prompt: str) -> Any:
    return getattr(processor, "tokenizer", processor)(prompt, return_tensors="pt")


def errors_of(outputs: Sequence[Output]) -> list[str]:
    return [output.error or "" for output in outputs]
