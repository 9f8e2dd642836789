"""Real models without a hub: their configuration, and a tokenizer and processor in their likeness; no weights."""

from __future__ import annotations

import json
import shutil
from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

from orchestrator.engine.models.base import ModelMaker

_CONFIGS = Path(__file__).with_name("configs")


class RealModel(ModelMaker):
    """Writes the folder that `load_format=dummy` needs.

    Attributes:
        hub_id: the model whose folder it stands for.
    """

    hub_id: ClassVar[str]

    def make(self, folder: Path) -> None:
        """Write configuration, generation settings, tokenizer and processor."""
        source = _CONFIGS / f"{self.name}.json"
        config = json.loads(source.read_bytes())
        self._write_processor(folder, config.get("text_config", config)["vocab_size"])
        shutil.copyfile(source, folder / "config.json")

    # The writers import transformers, and a maker is looked up before the configuration is accepted.
    @abstractmethod
    def _write_processor(self, folder: Path, vocab_size: int) -> None: ...


class InternVL25(RealModel):
    """InternVL2.5-8B."""

    name: ClassVar[str] = "internvl2_5_8b"
    version: ClassVar[int] = 1
    hub_id: ClassVar[str] = "OpenGVLab/InternVL2_5-8B"

    def _write_processor(self, folder: Path, vocab_size: int) -> None:
        from orchestrator.engine.models.processors_like import write_internvl2_5

        write_internvl2_5(folder, vocab_size)


class Qwen25VL3B(RealModel):
    """Qwen2.5-VL-3B-Instruct."""

    name: ClassVar[str] = "qwen2_5_vl_3b"
    version: ClassVar[int] = 1
    hub_id: ClassVar[str] = "Qwen/Qwen2.5-VL-3B-Instruct"

    def _write_processor(self, folder: Path, vocab_size: int) -> None:
        from orchestrator.engine.models.processors_like import write_qwen2_5_vl

        write_qwen2_5_vl(folder, vocab_size)


class Qwen25VL7B(Qwen25VL3B):
    """Qwen2.5-VL-7B-Instruct."""

    name: ClassVar[str] = "qwen2_5_vl_7b"
    version: ClassVar[int] = 1
    hub_id: ClassVar[str] = "Qwen/Qwen2.5-VL-7B-Instruct"


class LlavaOnevision7B(RealModel):
    """LLaVA-OneVision over Qwen2-7B."""

    name: ClassVar[str] = "llava_onevision_7b"
    version: ClassVar[int] = 1
    hub_id: ClassVar[str] = "llava-hf/llava-onevision-qwen2-7b-ov-hf"

    def _write_processor(self, folder: Path, vocab_size: int) -> None:
        from orchestrator.engine.models.processors_like import write_llava_onevision

        write_llava_onevision(folder, vocab_size)


class Qwen2Audio7B(RealModel):
    """Qwen2-Audio-7B-Instruct."""

    name: ClassVar[str] = "qwen2_audio_7b"
    version: ClassVar[int] = 1
    hub_id: ClassVar[str] = "Qwen/Qwen2-Audio-7B-Instruct"

    def _write_processor(self, folder: Path, vocab_size: int) -> None:
        from orchestrator.engine.models.processors_like import write_qwen2_audio

        write_qwen2_audio(folder, vocab_size)


class Opt125M(RealModel):
    """OPT-125M."""

    name: ClassVar[str] = "opt_125m"
    version: ClassVar[int] = 1
    hub_id: ClassVar[str] = "facebook/opt-125m"

    def _write_processor(self, folder: Path, vocab_size: int) -> None:
        from orchestrator.engine.models.processors_like import write_opt

        write_opt(folder, vocab_size)
