"""Weights by the package fastsafetensors: a whole file into a buffer on the device, then each tensor to its place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from orchestrator.checkpoint import Checkpoint
from orchestrator.config import WeightsConfig
from orchestrator.device.base import Device
from orchestrator.engine.build import first_line
from orchestrator.engine.weights.base import refuse_unreadable
from orchestrator.engine.weights.filling import fill_model
from orchestrator.engine.weights.jobs import Item
from orchestrator.errors import CheckpointError, ConfigError
from orchestrator.events import Progress


class FastSafetensorsLoader:
    """Takes more of the device than the other loaders: the weights, and the largest file a second time."""

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
        refuse_unreadable(checkpoint, "fastsafetensors")
        source = _Buffers(device.torch_device, progress)
        fill_model(model, checkpoint, source, torch_device=device.torch_device, dtype=dtype)
        device.empty_cache()
        return len(checkpoint.weight_files)


class _Buffers:
    def __init__(self, torch_device: str, progress: Progress) -> None:
        self._torch_device, self._progress = torch_device, progress
        self._make = _loader_class()

    def fill(self, items: Sequence[Item]) -> None:
        by_file: dict[Path, list[Item]] = {}
        for item in items:
            by_file.setdefault(item[0].file, []).append(item)
        for file, own in by_file.items():
            try:
                self._fill_from(file, own)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                raise CheckpointError(f"{file}: fastsafetensors cannot read it: {first_line(error)}") from error

    def _fill_from(self, file: Path, items: Sequence[Item]) -> None:
        loader = self._make(None, self._torch_device, nogds=True)
        try:
            wanted = {entry.name for entry, _ in items}
            loader.set_tensor_filter(lambda name: name in wanted)
            loader.add_filenames({0: [str(file)]})
            buffers = loader.copy_files_to_device()
            for entry, target in items:
                # A tensor without elements has no bytes that could be found.
                if entry.nbytes:
                    target.detach().copy_(buffers.get_tensor(entry.name))
                self._progress.advance(entry.nbytes)
            buffers.close()
        finally:
            loader.close()


def _loader_class() -> Any:
    """
    Raises:
        ConfigError: the package is not installed.
    """
    try:
        from fastsafetensors import SafeTensorsFileLoader
    except ImportError as error:
        raise ConfigError.of(
            "weights.loader",
            f"cannot be imported ({error}); install `fastsafetensors`, or give auto",
            "fastsafetensors",
        ) from error
    return SafeTensorsFileLoader
