"""What of a model encodes items of a modality: by transformers' convention, or as a known model does it itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutputWithPooling


def method_name(model_class: Any, modality: str) -> str | None:
    """The method of the convention; that for images where a model takes a video's frames as images. None if there is
    none."""
    own = f"get_{modality}_features"
    if hasattr(model_class, own):
        return own
    return "get_image_features" if modality == "video" and hasattr(model_class, "get_image_features") else None


def encodes(model_class: Any, model_type: str, modality: str) -> bool:
    return method_name(model_class, modality) is not None or (model_type, modality) in _OWN_WAYS


def encoder_call(model: Any, modality: str) -> Callable[..., Any]:
    """What takes the encoder's arguments by name and `return_dict`, and gives an output with `pooler_output`."""
    name = method_name(model, modality)
    if name is not None:
        call: Callable[..., Any] = getattr(model, name)
        return call
    return _OWN_WAYS[model.config.model_type, modality](model)


def _qwen2_audio(model: Any) -> Callable[..., Any]:
    tower, projector = model.base_model.audio_tower, model.base_model.multi_modal_projector

    def get_audio_features(
        input_features: torch.Tensor, feature_attention_mask: torch.Tensor, return_dict: bool = True
    ) -> BaseModelOutputWithPooling:
        """Mel frames (items, bins, frames) and which of them are audio (items, frames); the outputs of these, one item
        after the other."""
        heard, kept = tower._get_feat_extract_output_lengths(feature_attention_mask.sum(-1))
        # The first convolution keeps the number of frames, the second halves it.
        steps = torch.arange((input_features.shape[-1] - 2) // 2 + 1, device=heard.device)
        mask = create_bidirectional_mask(
            config=tower.config,
            inputs_embeds=input_features.new_zeros(len(heard), len(steps), 1),
            attention_mask=(steps < heard.unsqueeze(1)).long(),
        )
        hidden = projector(tower(input_features, attention_mask=mask).last_hidden_state)
        rows = torch.cat([item[:count] for item, count in zip(hidden, kept.tolist(), strict=True)])
        return BaseModelOutputWithPooling(pooler_output=rows)

    return get_audio_features


_OWN_WAYS: dict[tuple[str, str], Callable[[Any], Callable[..., Any]]] = {("qwen2_audio", "audio"): _qwen2_audio}
"""(model type, modality) of models that encode inside their forward."""
