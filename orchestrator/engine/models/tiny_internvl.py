"""A tiny InternVL with random weights: the real architecture, tiling and processor, in a few million parameters."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from orchestrator.engine.models.base import ModelMaker


class TinyInternVL(ModelMaker):
    """64 tokens a tile of 224 x 224, up to 12 tiles and a thumbnail an image: 832 tokens for the costliest."""

    name: ClassVar[str] = "tiny_internvl"
    version: ClassVar[int] = 1

    def make(self, folder: Path) -> None:
        """Write the model folder; the same bytes each time."""
        # Finding the maker must not import torch: it is looked up before the configuration is accepted.
        from orchestrator.engine.models.internvl import write_tiny

        write_tiny(folder)
