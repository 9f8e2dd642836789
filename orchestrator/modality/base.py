"""What a profiler of media must be able to do, and what the dummy data of a start look like."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from orchestrator.config import MediaConfig


@dataclass(frozen=True)
class ItemSpec:
    """One media item before it has pixels or samples.

    Attributes:
        modality: `image`, `video`, `audio` or a plugin's own.
        shape: what the profiler needs to build it; for an image (width, height).
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
    """

    modality: str
    token_ids: list[int]
    embed_mask: list[bool]
    tensors: dict[str, torch.Tensor]
    content_hash: str

    @property
    def num_embeds(self) -> int:
        """Encoder outputs, in rows."""
        return sum(self.embed_mask)


@dataclass(frozen=True)
class DummyBatch:
    """The costliest item of each modality that is on; used as often as the budget asks, never copied."""

    items: dict[str, MediaInputs]

    @property
    def tokens_per_item(self) -> dict[str, int]:
        return {modality: item.num_embeds for modality, item in self.items.items()}


class ModalityProfiler(ABC):
    """Finds the costliest item that limits and processor options allow, and makes one.

    A profiler belongs to a family of models: its name in the registry is the family's `model_type`, or one that
    `model.profiler` gives.
    """

    modalities: ClassVar[tuple[str, ...]]
    """What this family can take."""

    def __init__(self, processor: Any, model_config: Any, limits: MediaConfig) -> None:
        """
        Args:
            processor: the model's Hugging Face processor.
            model_config: its transformers configuration.
            limits: what a prompt may carry; `limits.processor_kwargs` override the processor's own options.
        """
        self.processor, self.model_config, self.limits = processor, model_config, limits

    @abstractmethod
    def tokens(self, modality: str, shape: tuple[int, ...]) -> int | None:
        """Encoder tokens of an item of this shape, equal to what the real processor makes of it; None where only the
        processor can tell."""

    @abstractmethod
    def costliest(self, modality: str) -> ItemSpec:
        """The item with the most encoder tokens within the limits."""

    @abstractmethod
    def build(self, spec: ItemSpec) -> Any:
        """An item of that shape as the processor takes it, such as a PIL image."""
