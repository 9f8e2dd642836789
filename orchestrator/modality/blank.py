"""Items that show and say nothing: what an item costs does not depend on what is in it."""

from __future__ import annotations

from typing import Any

from orchestrator.modality.base import ItemSpec

_GREY = 127


def blank(spec: ItemSpec) -> Any:
    """An image, a video or a recording of the shape that `spec` gives.

    Raises:
        ValueError: another modality.
    """
    makers = {"image": blank_image, "video": blank_video, "audio": silence}
    if spec.modality not in makers:
        raise ValueError(f"there is no blank {spec.modality}")
    return makers[spec.modality](spec.shape)


def blank_image(shape: tuple[int, ...]) -> Any:
    """A grey RGB image of (width, height)."""
    from PIL import Image

    return Image.new("RGB", (shape[0], shape[1]), (_GREY, _GREY, _GREY))


def blank_video(shape: tuple[int, ...]) -> Any:
    """Grey frames of (frames, width, height), as a uint8 array (frames, height, width, 3)."""
    import numpy as np

    frames, width, height = shape
    return np.full((frames, height, width, 3), _GREY, dtype=np.uint8)


def silence(shape: tuple[int, ...]) -> Any:
    """(samples,) as a float32 array."""
    import numpy as np

    return np.zeros(shape[0], dtype=np.float32)
