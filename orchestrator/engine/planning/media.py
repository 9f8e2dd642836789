"""Media without pixels: the model's own processor on tensors that have a shape alone."""

from __future__ import annotations

from typing import Any

import torch

from orchestrator.engine.base import Media
from orchestrator.engine.inputs import PromptBuilder
from orchestrator.modality.base import ItemSpec, MediaInputs


def outline(prompts: PromptBuilder, spec: ItemSpec, encoder_dtype: str) -> MediaInputs | None:
    """What the processor makes of an item of that shape; None where it cannot be made so.

    The result's pixels are one number that is seen everywhere, so that they take no memory on the host either.
    """
    data = _shape_alone(spec)
    if data is None:
        return None
    try:
        item = prompts.processed(Media(spec.modality, data), f"outline {spec.modality} {spec.shape}")
    # Any processor may look at pixels, each in its own way.
    except Exception:
        return None
    dtype = getattr(torch, encoder_dtype)
    tensors = {name: _hollow(each, dtype) if each.is_meta else each for name, each in item.tensors.items()}
    if not all(each.is_floating_point() for each in item.tensors.values() if each.is_meta):
        return None
    return MediaInputs(item.modality, item.token_ids, item.embed_mask, tensors, item.content_hash)


def _shape_alone(spec: ItemSpec) -> Any:
    """An image (3, height, width) or frames (frames, 3, height, width); a recording is cheap to make as it is."""
    if spec.modality not in ("image", "video"):
        return None
    *frames, width, height = spec.shape
    return torch.empty((*frames, 3, height, width), dtype=torch.uint8, device="meta")


def _hollow(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros((), dtype=dtype).expand(tensor.shape)
