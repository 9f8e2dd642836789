"""What writes a model folder without a hub."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar


class ModelMaker(ABC):
    """Makes one model, the same each time.

    Attributes:
        name: of the model in the registry.
        version: raised whenever `make` writes other bytes, so that folders of earlier versions are not used.
    """

    name: ClassVar[str]
    version: ClassVar[int]

    @abstractmethod
    def make(self, folder: Path) -> None:
        """Write configuration, tokenizer, processor, chat template and safetensors into an empty folder, in the layout
        that transformers' `Auto` classes read."""
