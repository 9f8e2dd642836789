"""What a profiler of media must be able to do, and what the dummy data of a start look like."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from orchestrator.config import MediaConfig


PROCESSOR_PARTS = {
    "images_kwargs": "image_processor",
    "videos_kwargs": "video_processor",
    "audio_kwargs": "feature_extractor",
}
"""What transformers calls the options of a part of a processor, and the part."""


@dataclass(frozen=True)
class ItemSpec:
    """One media item before it has pixels or samples.

    Attributes:
        modality: `image`, `video`, `audio` or a plugin's own.
        shape: what the profiler needs to build it: (width, height) of an image, (frames, width, height) of a video,
            (samples,) of a recording.
        tokens: encoder tokens that it becomes; None where only the processor can tell.
    """

    modality: str
    shape: tuple[int, ...]
    tokens: int | None


@dataclass(frozen=True)
class MediaInputs:
    """One media item as the model takes it.

    Attributes:
        modality: as in `ItemSpec`.
        token_ids: what the item's placeholder becomes in the prompt, wrappers included.
        embed_mask: for each of `token_ids`, whether an encoder output takes its place.
        tensors: the arguments of the encoder, on the host.
        content_hash: of what the item was made from; equal items are encoded once.
        shape: of a dummy item, as its profiler names it; empty for others.
    """

    modality: str
    token_ids: list[int]
    embed_mask: list[bool]
    tensors: dict[str, torch.Tensor]
    content_hash: str
    shape: tuple[int, ...] = ()

    @property
    def num_embeds(self) -> int:
        """Encoder outputs, in rows."""
        return sum(self.embed_mask)

    @property
    def num_bytes(self) -> int:
        """Of the encoder's arguments."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


@dataclass(frozen=True)
class DummyBatch:
    """The costliest item of each modality that is on; used as often as the budget asks, never copied.

    Attributes:
        items: by modality, the item with the most bytes of encoder input.
        most_tokens: by modality, the encoder tokens of the item with the most of them, where that is another item.
        per_prompt: by modality, how many of its items a prompt may carry.
    """

    items: dict[str, MediaInputs]
    most_tokens: dict[str, int] = field(default_factory=dict)
    per_prompt: dict[str, int] = field(default_factory=dict)

    @property
    def tokens_per_item(self) -> dict[str, int]:
        """The most encoder tokens that an item of each modality can have."""
        return {
            modality: max(item.num_embeds, self.most_tokens.get(modality, 0)) for modality, item in self.items.items()
        }


class ModalityProfiler(ABC):
    """Finds the costliest item that limits and processor options allow, and makes one.

    A profiler belongs to a family of models: its name in the registry is the family's `model_type`, or one that
    `model.profiler` gives.
    """

    modalities: ClassVar[tuple[str, ...]]
    """What this family can take."""

    items_per_prompt: ClassVar[Mapping[str, int]] = {}
    """How many items of a modality of its own a prompt may carry: `mm.limit_per_prompt` has keys for image, video and
    audio alone. Another number is a subclass away, named by `model.profiler=module:Class`."""

    def __init__(self, processor: Any, model_config: Any, limits: MediaConfig, max_tokens: int | None = None) -> None:
        """
        Args:
            processor: the model's Hugging Face processor.
            model_config: its transformers configuration.
            limits: what a prompt may carry; `limits.processor_kwargs` override the processor's own options.
            max_tokens: tokens of the longest sequence: an item with more can be in no prompt. None: not known.
        """
        self.processor, self.model_config, self.limits, self.max_tokens = processor, model_config, limits, max_tokens

    @abstractmethod
    def tokens(self, modality: str, shape: tuple[int, ...]) -> int | None:
        """Encoder tokens of an item of this shape, equal to what the real processor makes of it; None where only the
        processor can tell."""

    @abstractmethod
    def costliest(self, modality: str) -> ItemSpec:
        """The item with the most encoder tokens within the limits."""

    def heaviest(self, modality: str) -> ItemSpec:
        """The item with the most bytes of encoder input within the limits: what the encoder's memory is measured with.
        The one with the most tokens, unless a family thins tokens out after its encoder."""
        return self.costliest(modality)

    @abstractmethod
    def build(self, spec: ItemSpec) -> Any:
        """An item of that shape as the processor takes it: a PIL image, frames as a uint8 array (frames, height, width,
        3), samples as float32."""

    def option(self, group: str, name: str, default: Any = None) -> Any:
        """What the processor's part goes by: an option of `mm.processor_kwargs`, a default of the processor's calls, or
        the part's own attribute.

        Args:
            group: `images_kwargs`, `videos_kwargs` or `audio_kwargs`.
        """
        given = self.limits.processor_kwargs
        part = getattr(self.processor, PROCESSOR_PARTS[group], None)
        for known in (given.get(group), given, getattr(self.processor, group, None)):
            if isinstance(known, Mapping) and known.get(name) is not None:
                return known[name]
        found = getattr(part, name, None)
        return default if found is None else found
