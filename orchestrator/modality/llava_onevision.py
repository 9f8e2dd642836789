"""LLaVA-OneVision: an image is scaled into the best of many grids of tiles; above so many tiles' worth its tokens are
thinned out after the encoder.

So the image with the most tokens is not the one with the most tiles: both are found.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, sqrt
from typing import ClassVar

from orchestrator.modality.base import ItemSpec
from orchestrator.modality.built_in import BuiltInProfiler, size_entry
from orchestrator.modality.search import Size, candidate_sizes, costliest_of, fit, refined

_NOT_THINNED_UP_TO = 1.1


class LlavaOnevisionProfiler(BuiltInProfiler):
    modalities: ClassVar[tuple[str, ...]] = ("image", "video")

    def heaviest(self, modality: str) -> ItemSpec:
        """An image with the most tiles, of which the one with the most tokens."""
        if modality != "image":
            return self.costliest(modality)
        affordable = [
            size
            for size in self._sizes(self._image_limit())
            if self.max_tokens is None or self._image_tokens(*size) <= self.max_tokens
        ]
        if not affordable:
            return self.costliest(modality)
        most = max(self._tiles(*size) for size in affordable)
        full = [size for size in affordable if self._tiles(*size) == most]
        shape = costliest_of(self._image_tokens, full, self.max_tokens)
        return ItemSpec("image", shape, self._image_tokens(*shape))

    def _image_tokens(self, width: int, height: int) -> int:
        whole = int(self.processor.num_image_tokens)
        tokens = whole + self._tokens_of_tiles(width, height)
        return tokens - 1 if self.processor.vision_feature_select_strategy == "default" else tokens

    def _tokens_of_tiles(self, width: int, height: int) -> int:
        """Tokens of the tiles that show the image, and one a row for its end."""
        side = int(sqrt(self.processor.num_image_tokens))
        grid_width, grid_height = self._grid_of(width, height)
        tile = self._tile()
        columns, rows = self._without_padding(width, height, side * (grid_width // tile), side * (grid_height // tile))
        most = int(str(self.processor.vision_aspect_ratio).removeprefix("anyres_max_"))
        ratio = sqrt(columns * rows / (most * side**2))
        if ratio > _NOT_THINNED_UP_TO:
            columns, rows = int(columns // ratio), int(rows // ratio)
        return columns * rows + rows

    def _without_padding(self, width: int, height: int, columns: int, rows: int) -> Size:
        if width / height > columns / rows:
            padding = (rows - int(round(height * (columns / width), 7))) // 2
            return columns, rows - 2 * padding
        padding = (columns - int(round(width * (rows / height), 7))) // 2
        return columns - 2 * padding, rows

    def _grid_of(self, width: int, height: int) -> Size:
        """The grid, in pixels, on which most of the image's pixels are seen, and of these the one wasting fewest."""

        def quality(grid: Size) -> tuple[int, int]:
            scale = min(grid[0] / width, grid[1] / height)
            seen = min(int(width * scale) * int(height * scale), width * height)
            return seen, seen - grid[0] * grid[1]

        return max(self._grids(), key=quality)

    def _grids(self) -> list[Size]:
        pinpoints = self.option("images_kwargs", "image_grid_pinpoints")
        return [(int(width), int(height)) for height, width in pinpoints]

    def _tile(self) -> int:
        size = self.option("images_kwargs", "size")
        sides = [side for name in ("shortest_edge", "height", "width") if (side := size_entry(size, name)) is not None]
        return min(sides)

    def _tiles(self, width: int, height: int) -> int:
        across, down = self._grid_of(width, height)
        return (across // self._tile()) * (down // self._tile()) + 1

    def _image(self) -> tuple[int, ...]:
        most = self._image_limit()
        return refined(self._image_tokens, self._sizes(most), most, self.max_tokens)

    def _sizes(self, most: Size | None) -> list[Size]:
        found = set(candidate_sizes(most))
        for size in self._in_grids():
            if most is None:
                found.add(size)
            elif size[0] <= most[0] and size[1] <= most[1]:
                found |= {size, fit(size[0] / size[1], most)}
            else:
                found.add(fit(size[0] / size[1], most))
        return sorted(found)

    def _in_grids(self) -> Iterator[Size]:
        """Each grid filled, and with one side of the image shorter by some of its tokens."""
        side = int(sqrt(self.processor.num_image_tokens))
        step = self._tile() / side
        for width, height in self._grids():
            for less in range(0, side, 3):
                short = round(less * step)
                yield width - short, height
                yield width, height - short

    def _video_tokens(self, frames: int, width: int, height: int) -> int:
        side = ceil(int(sqrt(self.processor.num_image_tokens)) / 2)
        return frames * side * side + 1
