"""How images, videos and audio enter the prompts of a model, and what of the conventions for them it lacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orchestrator.engine.encoder_calls import encodes
from orchestrator.errors import CheckpointError

PARTS = {"image": "image_processor", "video": "video_processor", "audio": "feature_extractor"}
"""Modality -> the part of a processor that makes the encoder's arguments."""

_ONE_KIND_A_PROMPT = {"smolvlm": frozenset({"image", "video"})}
"""Models whose processor gives both of these under one name, so that its call on a prompt with both loses one."""


@dataclass(frozen=True)
class Placeholders:
    """Modality -> what stands for an item in a prompt, and the id whose embedding an encoder output replaces.

    Attributes:
        apart: modalities of which a prompt may only carry one.
    """

    texts: dict[str, str]
    embed_ids: dict[str, int]
    apart: frozenset[str] = frozenset()


def placeholders(config: Any, processor: Any, model_class: Any) -> Placeholders:
    """How items enter a prompt of this model; a modality that the model or its processor cannot take is left out."""
    taken = [modality for modality in PARTS if not _missing(modality, config, processor, model_class)]
    return Placeholders(
        {modality: str(getattr(processor, f"{modality}_token")) for modality in taken},
        {modality: _embed_id(modality, config, model_class) for modality in taken},
        _ONE_KIND_A_PROMPT.get(config.model_type, frozenset()),
    )


def refuse_without(modality: str, config: Any, processor: Any, model_class: Any) -> None:
    """Refuse a model that is made for a modality, but not by transformers' conventions.

    Raises:
        CheckpointError: what is missing.
    """
    if not _is_made_for(modality, config, model_class):
        return
    missing = _missing(modality, config, processor, model_class)
    if missing:
        items = modality if modality == "audio" else f"{modality}s"
        raise CheckpointError(
            f"a model of type '{config.model_type}' cannot be given {items}: {missing}; "
            f"mm.limit_per_prompt.{modality}=0 starts it without"
        )


def _is_made_for(modality: str, config: Any, model_class: Any) -> bool:
    if modality == "video":
        return "video" in (getattr(model_class, "input_modalities", None) or ())
    return hasattr(config, "vision_config" if modality == "image" else "audio_config")


def _missing(modality: str, config: Any, processor: Any, model_class: Any) -> str | None:
    """The first of the conventions for a modality that a model does not follow; None if it follows all."""
    if not encodes(model_class, getattr(config, "model_type", ""), modality):
        return f"{model_class.__name__} has no get_{modality}_features"
    if getattr(processor, PARTS[modality], None) is None:
        return f"{type(processor).__name__} has no {PARTS[modality]}"
    token = getattr(processor, f"{modality}_token", None)
    if token is None:
        return f"{type(processor).__name__} has no {modality}_token"
    if _embed_id(modality, config, model_class) < 0:
        return f"{type(config).__name__} has no {modality}_token_id"
    # An image's placeholder is held to that where prompts are made; a modality that few models have is left out.
    if modality != "image" and len(processor.tokenizer.encode(token, add_special_tokens=False)) != 1:
        return f"its tokenizer has no token {token}"
    return None


def _embed_id(modality: str, config: Any, model_class: Any) -> int:
    """The id whose embedding an encoder output replaces; negative if the configuration names none."""
    names = [f"{modality}_token_id", f"{modality}_token_index"]
    if modality == "video" and not hasattr(model_class, "get_video_features"):
        # Frames that are encoded as images stand in the prompt as images.
        names = ["image_token_id", "image_token_index"]
    ids = (getattr(config, name, None) for name in names)
    return next((int(found) for found in ids if found is not None), -1)
