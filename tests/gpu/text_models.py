"""Text models by their shapes alone, for `model.name=tests.gpu.text_models:Name` with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from orchestrator.engine.models.base import ModelMaker


class LlamaLike(ModelMaker):
    """A folder for a model of the Llama family without weights; its tokenizer knows bytes only.

    Attributes:
        shape: what differs between sizes, as transformers names it.
    """

    version: ClassVar[int] = 1
    shape: ClassVar[dict[str, Any]]

    def make(self, folder: Path) -> None:
        """Write configuration and tokenizer."""
        from orchestrator.engine.models.processors_like import write_opt

        write_opt(folder, self.shape["vocab_size"])
        config = {"model_type": "llama", "dtype": "bfloat16", "architectures": ["LlamaForCausalLM"], **self.shape}
        (folder / "config.json").write_text(json.dumps(config, indent=1))


class Llama3(LlamaLike):
    """Llama-3-8B."""

    name: ClassVar[str] = "llama_3_8b"
    shape: ClassVar[dict[str, Any]] = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }


class SmolLM2(LlamaLike):
    """SmolLM2-135M."""

    name: ClassVar[str] = "smollm2_135m"
    shape: ClassVar[dict[str, Any]] = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
