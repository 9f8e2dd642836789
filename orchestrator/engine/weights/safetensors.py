"""Weights from safetensors files, in one file or many, straight to where the model needs them."""

from __future__ import annotations

import torch

from orchestrator.checkpoint import Checkpoint
from orchestrator.config import WeightsConfig
from orchestrator.device.base import Device
from orchestrator.engine.weights.base import refuse_unreadable
from orchestrator.engine.weights.filling import fill_model
from orchestrator.engine.weights.transfer import Transfer
from orchestrator.engine.weights.tuning import tune
from orchestrator.events import Progress


class SafetensorsLoader:
    """Several threads read, each through two small pinned buffers, and the device copies meanwhile."""

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
        """Fill `model`; see `WeightsLoader.load`."""
        refuse_unreadable(checkpoint, "safetensors")
        tuning = tune(options, checkpoint.total_bytes, device.torch_device)
        with Transfer(device, tuning, progress) as transfer:
            fill_model(model, checkpoint, transfer, torch_device=device.torch_device, dtype=dtype)
        return len(checkpoint.weight_files)
