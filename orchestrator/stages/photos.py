"""Real photographs for `verify`: a folder of the user's, or the samples that scikit-learn or scikit-image ship."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError

_SAMPLES = (("sklearn", "datasets/images"), ("skimage", "data"))
_SUFFIXES = {".jpg", ".jpeg", ".png"}


def photo_files(folder: str | None) -> list[Path]:
    """Image files, in the order of their names: of `folder`, or of the first package that has samples; may be empty.

    Raises:
        ConfigError: a folder was given and holds none.
    """
    if folder is None:
        places = [place for package, inside in _SAMPLES if (place := _inside(package, inside)) is not None]
        return next((files for place in places if (files := _images(place))), [])
    files = _images(Path(folder).expanduser())
    if not files:
        raise ConfigError.of("stages.verify.images", "give a folder with .jpg or .png files", folder)
    return files


def open_photo(path: Path, max_size: list[int] | None) -> Any:
    """The picture in RGB, scaled down into `max_size` (width, height) if it is larger."""
    from PIL import Image

    with Image.open(path) as file:
        picture = file.convert("RGB")
    if max_size is not None:
        picture.thumbnail((max_size[0], max_size[1]))
    return picture


def drawn_picture(seed: int, max_size: list[int] | None) -> Any:
    """A picture of gradients, where there is no photograph; of 640 x 480 pixels or what `max_size` allows."""
    from PIL import Image

    channels = [Image.linear_gradient("L"), Image.radial_gradient("L"), Image.linear_gradient("L").rotate(90)]
    picture = Image.merge("RGB", channels).rotate(37 * seed).resize((640, 480))
    if max_size is not None:
        picture.thumbnail((max_size[0], max_size[1]))
    return picture


def _inside(package: str, inside: str) -> Path | None:
    """A folder of an installed package, found without importing it: scikit-learn alone takes seconds."""
    spec = find_spec(package)
    return Path(spec.origin).parent / inside if spec is not None and spec.origin else None


def _images(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES)
