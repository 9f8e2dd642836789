"""Random weights of the real size, made where they are needed: for starts that measure and do not answer."""

from __future__ import annotations

import hashlib

import torch

from orchestrator.checkpoint import Checkpoint
from orchestrator.config import WeightsConfig
from orchestrator.device.base import Device
from orchestrator.engine.weights.base import finish, tie
from orchestrator.engine.weights.slabs import allocate
from orchestrator.events import Progress

_STD = 0.02


class DummyLoader:
    """The same seed gives the same bytes on one kind of device. Reads no file."""

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
        tie(model)
        allocate(model, device.torch_device, dtype)
        generator = torch.Generator(device.torch_device)
        for name, parameter in model.named_parameters():
            generator.manual_seed(_seed_of(seed, name))
            _fill(name, parameter, generator)
            progress.advance(parameter.nbytes)
        finish(model, model.parameters())
        progress.advance(sum(buffer.nbytes for buffer in model.buffers()))
        return 0


def _seed_of(seed: int, name: str) -> int:
    """A tensor's own seed: what it becomes does not depend on which others the model has."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big") >> 1


def _fill(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    """Zero biases, unit norms and scales, small matrices: activations stay finite in bfloat16 at any depth."""
    if "bias" in name.rpartition(".")[2] or not parameter.is_floating_point():
        parameter.zero_()
    elif parameter.ndim < 2:
        parameter.fill_(1.0)
    else:
        parameter.normal_(0.0, _STD, generator=generator)
