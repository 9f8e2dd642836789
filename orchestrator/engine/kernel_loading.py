"""Loading kernels while weights are read, so that the first step does not wait for them.

Only what the interpreter is slow at and the weights are not needed for: Triton's kernels, and the library of matrix
products. To run whole steps of every size there was measured too, and took longer than it saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from orchestrator.config import Config
from orchestrator.device.base import Device, WorksAside
from orchestrator.engine.build import first_line
from orchestrator.engine.loading import Prepared
from orchestrator.engine.runner import ModelRunner
from orchestrator.engine.weights.slabs import own_tensors

_POLL_S = 0.005


def load_kernels(prepared: Prepared, config: Config, device: Device, wanted: Callable[[], bool]) -> str | None:
    """See `LoadsKernels`.

    Args:
        wanted: whether the weights are still being loaded; without memory they are waited for as long as that.
    """
    if not isinstance(device, WorksAside) or not _has_memory(prepared.model, wanted):
        return None
    with device.aside():
        # Caught inside, so that no tensor of a failed step is left when the memory is given back.
        try:
            with torch.inference_mode():
                place = device.torch_device
                runner = ModelRunner(prepared.model, prepared.backend, place, prepared.traits, 1, device.pin)
                runner.compile_kernels(config.kv.block_size, prepared.kv_spec.dtype)
        except Exception as error:
            return first_line(error)
    return None


def _has_memory(model: torch.nn.Module, wanted: Callable[[], bool]) -> bool:
    """Wait until the model has memory; False where it gets none here."""
    while any(tensor.is_meta for module in model.modules() for _, tensor in own_tensors(module)):
        if not wanted():
            return False
        time.sleep(_POLL_S)
    return True
