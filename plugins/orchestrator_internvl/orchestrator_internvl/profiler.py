"""InternVL cuts an image into the grid of tiles whose aspect ratio is nearest, and adds a thumbnail of the whole.

So an image's cost follows from its shape, not from its pixels: with at most 12 tiles, every 4:3 image becomes 12 + 1,
however small, and a 2000 x 2000 one only 9 + 1. A frame of a video is one tile.
"""

from __future__ import annotations

from typing import Any, ClassVar

from orchestrator import ItemSpec, ModalityProfiler, UserError

Grid = tuple[int, int]
"""(columns, rows)."""


class InternVLProfiler(ModalityProfiler):
    """Images and videos of InternVL 2.5 and 3 as transformers' processors cut them."""

    modalities: ClassVar[tuple[str, ...]] = ("image", "video")

    def tokens(self, modality: str, shape: tuple[int, ...]) -> int:
        """Tiles, thumbnail included, or frames, times the tokens of a tile."""
        return self._of_tile() * (shape[0] if modality == "video" else self._tiles(shape[0], shape[1]))

    def costliest(self, modality: str) -> ItemSpec:
        """The grid with the most tiles that an image inside `mm.image.max_size` is cut into; as many frames as
        `mm.video.max_frames` allows or a sequence has room for.

        Raises:
            UserError: neither is known.
        """
        shape = self._video() if modality == "video" else self._image()
        return ItemSpec(modality, shape, self.tokens(modality, shape))

    def build(self, spec: ItemSpec) -> Any:
        from PIL import Image

        *frames, width, height = spec.shape
        image = Image.new("RGB", (width, height), (127, 127, 127))
        return [image] * frames[0] if frames else image

    def _image(self) -> tuple[int, ...]:
        shapes = [shape for grid in self._grids() if (shape := self._shape_for(grid)) is not None] or [self._largest()]
        tiles = {shape: self._tiles(*shape) for shape in shapes}
        most = max(tiles.values()) if self.max_tokens is None else self.max_tokens // self._of_tile()
        fitting = [shape for shape in shapes if tiles[shape] <= most] or [min(shapes, key=lambda shape: tiles[shape])]
        return max(fitting, key=lambda shape: (tiles[shape], -shape[0] * shape[1]))

    def _video(self) -> tuple[int, ...]:
        room = None if self.max_tokens is None else max(1, self.max_tokens // self._of_tile())
        known = [frames for frames in (self.limits.video.max_frames, room) if frames is not None]
        if not known:
            raise UserError("nothing says how long a video may be; give mm.video.max_frames")
        size = self.option("videos_kwargs", "size")
        width, height = int(size["width"]), int(size["height"])
        most = self.limits.video.max_size or [width, height]
        return min(known), min(width, most[0]), min(height, most[1])

    def _of_tile(self) -> int:
        return int(self.processor.image_seq_length)

    def _option(self, name: str) -> Any:
        return self.option("images_kwargs", name)

    def _tile(self) -> tuple[int, int]:
        size = self._option("size")
        return int(size["width"]), int(size["height"])

    def _grids(self) -> list[Grid]:
        """Allowed grids, fewest tiles first, then narrowest: the order in which ties are broken."""
        if not self._option("crop_to_patches"):
            return [(1, 1)]
        least, most = self._option("min_patches"), self._option("max_patches")
        sides = range(1, most + 1)
        grids = [(columns, rows) for columns in sides for rows in sides if least <= columns * rows <= most]
        return sorted(grids, key=lambda grid: grid[0] * grid[1])

    def _tiles(self, width: int, height: int) -> int:
        columns, rows = self._grid_of(width, height)
        return columns * rows + (1 if columns * rows > 1 else 0)

    def _grid_of(self, width: int, height: int) -> Grid:
        """The grid nearest in aspect ratio; of equally near ones the last whose tiles cover under twice the image."""
        if not self._option("crop_to_patches") or self._option("max_patches") <= 1:
            return (1, 1)
        tile_width, tile_height = self._tile()
        best, nearest = (1, 1), float("inf")
        for columns, rows in self._grids():
            distance = abs(width / height - columns / rows)
            covers = tile_width * tile_height * columns * rows
            if distance < nearest or (distance == nearest and 2 * width * height > covers):
                best, nearest = (columns, rows), distance
        return best

    def _shape_for(self, grid: Grid) -> tuple[int, int] | None:
        """The largest image of exactly the grid's aspect ratio within the limit, at most one that fills its tiles."""
        tile_width, tile_height = self._tile()
        unit = max(tile_width, tile_height)
        if (most := self.limits.image.max_size) is not None:
            unit = min(unit, most[0] // grid[0], most[1] // grid[1])
        return (grid[0] * unit, grid[1] * unit) if unit >= 1 else None

    def _largest(self) -> tuple[int, int]:
        most = self.limits.image.max_size
        return (most[0], most[1]) if most is not None else self._tile()
