"""Families that cut an image into equal squares: SmolVLM and Idefics3, Gemma3."""

from __future__ import annotations

from math import ceil, floor
from typing import ClassVar

from orchestrator.modality.built_in import BuiltInProfiler, size_entry
from orchestrator.modality.search import Size

_LARGEST_SIDE = 4096
"""Pixels to which Idefics3 and SmolVLM scale an image at most, whatever their options say."""


class Idefics3Profiler(BuiltInProfiler):
    """Images of Idefics3: scaled to one length of the longer side, cut into squares, and once more as a whole. A square
    image costs most, of whatever size."""

    modalities: ClassVar[tuple[str, ...]] = ("image",)

    def _image_tokens(self, width: int, height: int) -> int:
        return int(self.processor.image_seq_len) * self._squares(width, height)

    def _squares(self, width: int, height: int) -> int:
        if not self.option("images_kwargs", "do_image_splitting"):
            return 1
        longest = size_entry(self.option("images_kwargs", "size"), "longest_edge") or max(width, height)
        side = size_entry(self.option("images_kwargs", "max_image_size"), "longest_edge") or longest
        scaled = _below(*_to_length(width, height, longest), _LARGEST_SIDE)
        columns, rows = (ceil(length / side) for length in scaled)
        return columns * rows + 1 if columns * rows > 1 else 1


class SmolVLMProfiler(Idefics3Profiler):
    """Images as Idefics3's, and videos whose frames are one square each."""

    modalities: ClassVar[tuple[str, ...]] = ("image", "video")

    def _video_tokens(self, frames: int, width: int, height: int) -> int:
        return frames * int(self.processor.image_seq_len)


class Gemma3Profiler(BuiltInProfiler):
    """Images of Gemma3: one square; with `do_pan_and_scan` also crops along the longer side of an uneven image."""

    modalities: ClassVar[tuple[str, ...]] = ("image",)

    def _image_tokens(self, width: int, height: int) -> int:
        return int(self.processor.image_seq_length) * (1 + self._crops(max(width, height), min(width, height)))

    def _crops(self, long: int, short: int) -> int:
        if not self.option("images_kwargs", "do_pan_and_scan"):
            return 0
        least_side = int(self.option("images_kwargs", "pan_and_scan_min_crop_size"))
        if long / short < float(self.option("images_kwargs", "pan_and_scan_min_ratio_to_activate")):
            return 0
        wanted = min(long // least_side, floor(long / short + 0.5))
        crops = min(int(self.option("images_kwargs", "pan_and_scan_max_num_crops")), max(2, wanted))
        return crops if min(ceil(long / crops), short) >= least_side else 0


def _to_length(width: int, height: int, longest: int) -> Size:
    """With the longer side of that length, and the other, rounded up to an even number."""
    if width >= height:
        other = int(longest / (width / height))
        return longest, max(1, other + other % 2)
    other = int(longest * (width / height))
    return max(1, other + other % 2), longest


def _below(width: int, height: int, most: int) -> Size:
    if width >= height and width > most:
        return most, max(1, int(most / (width / height)))
    if height > width and height > most:
        return max(1, int(most * (width / height))), most
    return width, height
