"""Weights that take a card's memory and have no bytes."""

from __future__ import annotations

import torch

from orchestrator.checkpoint import Checkpoint
from orchestrator.config import WeightsConfig
from orchestrator.device.base import Device
from orchestrator.engine.planning.shapes import Shapes
from orchestrator.engine.weights.base import tie
from orchestrator.engine.weights.filling import assigned
from orchestrator.engine.weights.slabs import allocate
from orchestrator.events import Progress


class ShapesLoader:
    """Gives a model tensors of the right shapes, in the order in which the real loaders allocate them."""

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes

    @torch.no_grad()
    def load(
        self,
        model: torch.nn.Module,
        checkpoint: Checkpoint,
        *,
        device: Device,
        dtype: torch.dtype,
        seed: int,
        progress: Progress,
        options: WeightsConfig,
    ) -> int:
        """See `WeightsLoader.load`. Of files the headers are enough, also to refuse those of another model."""
        tie(model)
        order = [name for _, name in assigned(model, checkpoint).direct] if checkpoint.weight_files else []
        with self._shapes.running():
            allocate(model, device.torch_device, dtype, order)
        model.eval()
        return 0
