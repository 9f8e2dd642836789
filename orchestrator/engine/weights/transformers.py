"""Weights by transformers' own `from_pretrained`, to compare with and to fall back on."""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers.utils import logging as transformers_logging
from transformers.utils.import_utils import is_accelerate_available

from orchestrator.checkpoint import Checkpoint
from orchestrator.config import WeightsConfig
from orchestrator.device.base import Device
from orchestrator.engine.build import first_line
from orchestrator.engine.weights.base import refuse_leftovers, refuse_unreadable, shape_error
from orchestrator.errors import CheckpointError
from orchestrator.events import Progress


class TransformersLoader:
    """Reads straight to the device where `accelerate` is installed, which transformers needs for that; else the whole
    model goes through host memory. Progress is told once, at the end."""

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
        refuse_unreadable(checkpoint, "transformers")
        loaded, report = _from_pretrained(model, checkpoint, device.torch_device, dtype)
        for name, found, wanted in report["mismatched_keys"]:
            raise shape_error(checkpoint, name, found, wanted)
        refuse_leftovers(model, checkpoint, sorted(report["missing_keys"]), sorted(report["unexpected_keys"]))
        loaded.to(device.torch_device)
        _move(loaded, model)
        model.requires_grad_(False).eval()
        progress.advance(checkpoint.total_bytes)
        return len(checkpoint.weight_files)


def _from_pretrained(
    model: torch.nn.Module, checkpoint: Checkpoint, torch_device: str, dtype: torch.dtype
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model of the same class and configuration, and what transformers says of names that did not match."""
    place: dict[str, Any] = {"device_map": {"": torch_device}} if is_accelerate_available() else {}
    logging: Any = transformers_logging
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    # What it would warn of is refused here.
    logging.set_verbosity_error()
    try:
        found: tuple[torch.nn.Module, dict[str, Any]] = cast(Any, type(model)).from_pretrained(
            checkpoint.folder,
            config=cast(Any, model).config,
            dtype=dtype,
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **place,
        )
    except torch.OutOfMemoryError:
        raise
    # Of many kinds: its own, those of safetensors, those of what the model's class does.
    except Exception as error:
        raise CheckpointError(f"{checkpoint.folder}: transformers cannot load it: {first_line(error)}") from error
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
    return found


def _move(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Give `target` the tensors of `source`, module by module; what is one tensor there is one here."""
    for theirs, ours in zip(source.modules(), target.modules(), strict=True):
        ours._parameters, ours._buffers = theirs._parameters, theirs._buffers
        tensors = {name: value for name, value in vars(theirs).items() if isinstance(value, torch.Tensor)}
        vars(ours).update(tensors)
