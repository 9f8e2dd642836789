"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: a token for each square of patches; sizes are scaled between two areas.

So an image's cost follows from its area, up to a cap. Qwen2-VL and 2.5-VL cap each frame of a video, Qwen3-VL all
frames together; two frames make one step in time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, sqrt
from typing import ClassVar

from orchestrator.modality.built_in import BuiltInProfiler, size_entry
from orchestrator.modality.search import Size, best_grid, bounded, candidate_sizes, costliest_of, refined

_MOST_UNEVEN = 200
_TRIES = 64


@dataclass(frozen=True)
class Scaling:
    """How frames are cut: `side` pixels to a token's square, between `least` and `most` pixels; `frames` in time count
    towards these."""

    side: int
    least: int
    most: int
    frames: int = 1
    counted_frames: int = 1

    def grid(self, width: int, height: int) -> Size:
        """(columns, rows) of tokens; (0, 0) for what the processor refuses."""
        if max(width, height) > _MOST_UNEVEN * min(width, height):
            return 0, 0
        columns, rows = round(width / self.side), round(height / self.side)
        area = self.counted_frames * columns * rows * self.side**2
        true_area = self.frames * width * height
        if area > self.most:
            by = sqrt(true_area / self.most)
            return max(1, floor(width / by / self.side)), max(1, floor(height / by / self.side))
        if area < self.least:
            by = sqrt(self.least / true_area)
            return ceil(width * by / self.side), ceil(height * by / self.side)
        return columns, rows


class QwenVLProfiler(BuiltInProfiler):
    """Images and videos of Qwen2-VL and Qwen2.5-VL."""

    modalities: ClassVar[tuple[str, ...]] = ("image", "video")

    def _image_tokens(self, width: int, height: int) -> int:
        columns, rows = self._image_scaling().grid(width, height)
        return columns * rows

    def _image(self) -> tuple[int, ...]:
        most = self._image_limit()
        scaling = self._image_scaling()
        cells = _fewest(scaling.most // scaling.side**2, self.max_tokens)
        sizes = [*candidate_sizes(most), *_exact(scaling.side, cells, most)]
        return refined(self._image_tokens, sizes, most, self.max_tokens)

    def _image_scaling(self) -> Scaling:
        return Scaling(self._side("images_kwargs"), *self._areas("images_kwargs"))

    def _video_tokens(self, frames: int, width: int, height: int) -> int:
        # Of frames so low the processor takes rows for channels.
        if height in (1, 3):
            return 0
        columns, rows = self._scale_frames(frames, width, height)
        return ceil(frames / self._steps_of()) * columns * rows

    def _scale_frames(self, frames: int, width: int, height: int) -> Size:
        return self._video_scaling(frames).grid(width, height)

    def _video(self) -> tuple[int, ...]:
        """Of as many frames as limits, or else the processor's own sampling, allow; the fewest that cost most."""
        most = self._video_limit()
        shapes = [(frames, *size) for frames in self._frame_counts(most) for size in self._sizes_for(frames, most)]
        frames = costliest_of(lambda *shape: self._video_tokens(*shape), shapes, self.max_tokens)[0]

        def cost(width: int, height: int) -> int:
            return self._video_tokens(frames, width, height)

        sizes = [*candidate_sizes(most), *self._sizes_for(frames, most)]
        return (frames, *refined(cost, sizes, most, self.max_tokens))

    def _frame_counts(self, most_size: Size | None) -> list[int]:
        """Numbers of frames around those where more of them only make each smaller."""
        step = self._steps_of()
        allowed = self.limits.video.max_frames or self.option("videos_kwargs", "max_frames")
        longest = None if self.max_tokens is None else self.max_tokens * step
        most = bounded("video", "mm.video.max_frames", allowed, longest)
        of_one = max(self._video_tokens(step, *size) for size in self._sizes_for(step, most_size)) or 1
        turns = [1, *self._turns(of_one)]
        if self.max_tokens is not None:
            turns.append(step * self.max_tokens // of_one)
        near = {frames for turn in turns for frames in range(turn - step, turn + _TRIES)}
        return sorted({most, most - 1} | near & set(range(1, most + 1)) - {0})

    def _turns(self, of_one: int) -> list[int]:
        """Numbers of frames at which a cap on all of them together begins to hold; `of_one`: tokens of a step in
        time."""
        return []

    def _sizes_for(self, frames: int, most: Size | None) -> list[Size]:
        scaling = self._video_scaling(frames)
        in_time = ceil(frames / self._steps_of())
        cells = scaling.most // (scaling.counted_frames * scaling.side**2)
        if self.max_tokens is not None:
            cells = min(cells, self.max_tokens // in_time)
        return [*_exact(scaling.side, cells, most), *_strips(scaling.side, most)]

    def _video_scaling(self, frames: int) -> Scaling:
        side, (least, most) = self._side("videos_kwargs"), self._areas("videos_kwargs")
        if self.option("videos_kwargs", "cap_pixels_per_frame"):
            together = int(int(self.option("videos_kwargs", "max_video_tokens")) * side**2 * 0.9)
            most = max(min(most, together * self._steps_of() // frames), int(least * 1.05))
        return Scaling(side, least, most)

    def _steps_of(self) -> int:
        """Frames that make one step in time."""
        return int(self.option("videos_kwargs", "temporal_patch_size"))

    def _side(self, group: str) -> int:
        return int(self.option(group, "patch_size")) * int(self.option(group, "merge_size"))

    def _areas(self, group: str) -> tuple[int, int]:
        """Fewest and most pixels."""
        size = self.option(group, "size")
        bounds = [
            self.option(group, name, size_entry(size, edge))
            for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
        ]
        return int(bounds[0]), int(bounds[1])


class Qwen3VLProfiler(QwenVLProfiler):
    """Images and videos of Qwen3-VL, whose area is that of all frames together."""

    def _turns(self, of_one: int) -> list[int]:
        scaling = self._video_scaling(self._steps_of())
        return [scaling.most // (scaling.side**2 * of_one)]

    def _scale_frames(self, frames: int, width: int, height: int) -> Size:
        scaling = self._video_scaling(frames)
        if frames < self._steps_of():
            return 0, 0
        # A frame that is smaller than one token is made larger first.
        if min(width, height) < scaling.side:
            by = max(scaling.side / height, scaling.side / width)
            width, height = int(width * by), int(height * by)
        return scaling.grid(width, height)

    def _video_scaling(self, frames: int) -> Scaling:
        side, (least, most) = self._side("videos_kwargs"), self._areas("videos_kwargs")
        if self.option("videos_kwargs", "cap_pixels_per_frame"):
            of_one = int(self.option("videos_kwargs", "max_video_tokens")) * side**2
            most = max(min(of_one, most // frames), int(least * 1.05)) * frames
        counted = round(frames / self._steps_of()) * self._steps_of()
        return Scaling(side, least, most, frames, max(1, counted))


def _exact(side: int, cells: int, most: Size | None) -> list[Size]:
    """The size that is cut without scaling into the most squares, at most `cells`."""
    inside = None if most is None else (max(1, round(most[0] / side)), max(1, round(most[1] / side)))
    grid = best_grid(cells, inside, _MOST_UNEVEN)
    if grid is None:
        return []
    width, height = grid[0] * side, grid[1] * side
    return [(width, height) if most is None else (min(width, most[0]), min(height, most[1]))]


def _strips(side: int, most: Size | None) -> list[Size]:
    """The most uneven sizes: what is thinner than a token is rounded up to one, above the cap too."""
    found = []
    for thin in (1, 2, side // 2 + 1, side - 1, side):
        for width, height in ((_MOST_UNEVEN * thin, thin), (thin, _MOST_UNEVEN * thin)):
            inside = (width, height) if most is None else (min(width, most[0]), min(height, most[1]))
            found.append(inside)
    return found


def _fewest(cells: int, most: int | None) -> int:
    return cells if most is None else min(cells, most)
