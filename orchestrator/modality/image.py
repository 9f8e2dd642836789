"""Images of an unknown family: the costliest one is searched for with the processor's own arithmetic."""

from __future__ import annotations

from typing import Any, ClassVar

from orchestrator.errors import UserError
from orchestrator.modality.base import ItemSpec, ModalityProfiler

_WIDE = ((4, 3), (3, 2), (2, 1), (3, 1), (4, 1), (6, 1), (12, 1))
_RATIOS = ((1, 1), *_WIDE, *((height, width) for width, height in _WIDE))
_LONG_SIDES = (224, 448, 896, 1344, 1792, 2688, 3584, 5376)


class GenericImageProfiler(ModalityProfiler):
    """Asks the processor how many tokens images of many sizes and aspect ratios become, and takes the smallest of the
    costliest. Works for every processor that follows transformers' convention (`_get_num_multimodal_tokens`), and
    for one whose image processor counts patches, each of equally many tokens (`get_number_of_image_patches`)."""

    modalities: ClassVar[tuple[str, ...]] = ("image",)

    def tokens(self, modality: str, shape: tuple[int, ...]) -> int | None:
        """None: the processor's count includes wrappers that are not encoder outputs."""
        return None

    def costliest(self, modality: str) -> ItemSpec:
        """
        Raises:
            UserError: the processor cannot count tokens.
        """
        shapes = self._candidates()
        counts = self._count(shapes)
        shape = max(zip(counts, shapes, strict=True), key=lambda pair: (pair[0], -pair[1][0] * pair[1][1]))[1]
        return ItemSpec("image", shape, None)

    def build(self, spec: ItemSpec) -> Any:
        return plain_image(spec.shape)

    def _candidates(self) -> list[tuple[int, int]]:
        """(width, height) pairs inside `mm.image.max_size`; that size itself among them."""
        most = self.limits.image.max_size
        found = {_with_long_side(ratio, side) for ratio in _RATIOS for side in _LONG_SIDES}
        if most is not None:
            scaled = {_fit(ratio, most[0], most[1]) for ratio in _RATIOS}
            found = {size for size in found | scaled if size[0] <= most[0] and size[1] <= most[1]}
            found.add((most[0], most[1]))
        return sorted(found)

    def _count(self, shapes: list[tuple[int, int]]) -> list[int]:
        count = getattr(self.processor, "_get_num_multimodal_tokens", None)
        if count is None:
            return self._count_patches(shapes)
        sizes = [[height, width] for width, height in shapes]
        return list(count(image_sizes=sizes, **self.limits.processor_kwargs)["num_image_tokens"])

    def _count_patches(self, shapes: list[tuple[int, int]]) -> list[int]:
        count = getattr(getattr(self.processor, "image_processor", None), "get_number_of_image_patches", None)
        if count is None:
            raise UserError(
                f"{type(self.processor).__name__} cannot say how many tokens an image becomes (neither it has "
                "_get_num_multimodal_tokens nor its image processor get_number_of_image_patches); "
                "mm.limit_per_prompt.image=0 starts text only"
            )
        given = self.limits.processor_kwargs
        options = {**given, **given.get("images_kwargs", {})}
        counts = [count(height, width, options) for width, height in shapes]
        return [patches[0] if isinstance(patches, tuple) else patches for patches in counts]


def plain_image(shape: tuple[int, ...]) -> Any:
    """A grey RGB image of (width, height): what an image costs does not depend on what it shows."""
    from PIL import Image

    return Image.new("RGB", (shape[0], shape[1]), (127, 127, 127))


def _with_long_side(ratio: tuple[int, int], side: int) -> tuple[int, int]:
    longest = max(ratio)
    return max(1, ratio[0] * side // longest), max(1, ratio[1] * side // longest)


def _fit(ratio: tuple[int, int], width: int, height: int) -> tuple[int, int]:
    unit = max(1, min(width // ratio[0], height // ratio[1]))
    return ratio[0] * unit, ratio[1] * unit
