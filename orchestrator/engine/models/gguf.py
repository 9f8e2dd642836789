"""From a GGUF file to a model folder, by transformers' own reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import modeling_gguf_pytorch_utils as gguf_utils

from orchestrator.engine.models.writing import save_quietly


def convert(source: Path, folder: Path) -> None:
    """Write configuration, tokenizer and weights in float32; needs the package `gguf`.

    Raises:
        ValueError: an architecture that transformers does not read, or weights that do not fill the model.
    """
    auto: Any = transformers.AutoTokenizer
    auto.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
    config = transformers.AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    make: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = make.from_config(config, dtype=torch.float32)
    # `from_pretrained` would do the same, and ask for accelerate, which slows every later import of transformers.
    read = cast(Any, gguf_utils).load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)
    model.load_state_dict(read["tensors"], strict=False, assign=True)
    model.tie_weights()
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty:
        raise ValueError(f"{source} has no weights for {', '.join(empty)}")
    save_quietly(model, folder)
