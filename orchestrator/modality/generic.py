"""Media of an unknown family: the costliest item is searched for with the processor's own arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from orchestrator.errors import UserError
from orchestrator.modality.base import ItemSpec
from orchestrator.modality.built_in import LimitedProfiler, frame_side
from orchestrator.modality.search import bounded, candidate_sizes, costliest_of, most_that_fit

Shape = tuple[int, ...]


class GenericProfiler(LimitedProfiler):
    """Asks the processor how many tokens items of many shapes become, and takes the smallest of the costliest.

    Works for every processor that follows transformers' convention (`_get_num_multimodal_tokens`), and for one whose
    image processor counts patches, each of equally many tokens (`get_number_of_image_patches`). Videos and recordings
    that the processor cannot count are made as long as the limits allow.
    """

    modalities: ClassVar[tuple[str, ...]] = ("image", "video", "audio")

    def tokens(self, modality: str, shape: Shape) -> None:
        """None: the processor's count includes wrappers that are not encoder outputs."""

    def costliest(self, modality: str) -> ItemSpec:
        """
        Raises:
            UserError: the processor cannot count an image's tokens, or nothing bounds a video or a recording.
        """
        shape = {"image": self._image, "video": self._video, "audio": self._audio}[modality]()
        return ItemSpec(modality, shape, None)

    def _image(self) -> Shape:
        shapes = candidate_sizes(self._image_limit())
        counts = self._counts("image", [[height, width] for width, height in shapes])
        if counts is None:
            counts = self._image_patches(shapes)
        return self._best(shapes, counts)

    def _video(self) -> Shape:
        """The costliest of many sizes and numbers of frames, and then as many frames of it as may be."""
        if self._counts("video", [[2, 224, 224]]) is None:
            return self._longest_video()
        allowed = self.limits.video.max_frames or self.option("videos_kwargs", "max_frames")
        frames = bounded("video", "mm.video.max_frames", allowed, self.max_tokens)
        # Odd ones too: two frames are often one step in time, and a cap on all frames may round their number.
        doubling = [1 << power for power in range(1, frames.bit_length())]
        lengths = sorted({frames, *doubling, *(length + 1 for length in doubling if length < frames)})
        sizes = candidate_sizes(self._video_limit())
        best = self._best_video([(length, *size) for length in lengths for size in sizes])
        size = best[1:]
        more = most_that_fit(lambda length: self._video_count((length, *size)), frames, self.max_tokens)
        return self._best_video([best, (more, *size)])

    def _best_video(self, shapes: list[Shape]) -> Shape:
        counts = self._counts("video", [[frames, height, width] for frames, width, height in shapes]) or []
        return self._best(shapes, counts)

    def _video_count(self, shape: Shape) -> int:
        frames, width, height = shape
        return (self._counts("video", [[frames, height, width]]) or [0])[0]

    def _longest_video(self) -> Shape:
        frames = bounded("video", "mm.video.max_frames", self.limits.video.max_frames)
        side = frame_side(self)
        return (frames, *(self._video_limit() or (side, side)))

    def _audio(self) -> Shape:
        samples = self._longest_audio()
        if self._counts("audio", [samples]) is None:
            return (samples,)
        return (most_that_fit(lambda length: (self._counts("audio", [length]) or [0])[0], samples, self.max_tokens),)

    def _best(self, shapes: Sequence[Shape], counts: list[int]) -> Shape:
        known = dict(zip(shapes, counts, strict=True))
        return costliest_of(lambda *shape: known[shape], shapes, self.max_tokens)

    def _counts(self, modality: str, sizes: Sequence[Any]) -> list[int] | None:
        """Tokens by transformers' convention, 0 for a shape that the processor refuses; None where it has none."""
        argument = "audio_lengths" if modality == "audio" else f"{modality}_sizes"
        count = getattr(self.processor, "_get_num_multimodal_tokens", None)
        if count is None:
            return None
        options = self.limits.processor_kwargs
        try:
            found = count(**{argument: sizes}, **options)[f"num_{modality}_tokens"]
        except ValueError:
            if len(sizes) == 1:
                return [0]
            return [(self._counts(modality, [size]) or [0])[0] for size in sizes]
        except (TypeError, AttributeError, KeyError, NotImplementedError):
            return None
        return None if found is None else [int(tokens) for tokens in found]

    def _image_patches(self, shapes: Sequence[Shape]) -> list[int]:
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
