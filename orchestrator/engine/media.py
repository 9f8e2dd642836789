"""What a request brings as an image, a video or audio: checked, in one form, and recognised when it comes again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from threading import Lock
from typing import Any

import numpy as np

from orchestrator.config import MediaConfig
from orchestrator.engine.base import Media
from orchestrator.errors import OrchestratorError

DEFAULT_FPS = 2.0
"""Frames a second of a video where the processor does not say at which rate it would have sampled it."""


class RequestError(OrchestratorError):
    """What is wrong with one request; the others go on."""


@dataclass(frozen=True)
class Ears:
    """What a processor does with audio.

    Attributes:
        rate: samples a second; None for a processor that takes no audio.
        most_samples: what it keeps of one item; None if it keeps everything.
    """

    rate: int | None = None
    most_samples: int | None = None

    @classmethod
    def of(cls, processor: Any) -> Ears:
        extractor = getattr(processor, "feature_extractor", None)
        rate = getattr(extractor, "sampling_rate", None)
        cuts = getattr(processor, "audio_kwargs", {}).get("truncation", True)
        return cls(rate, getattr(extractor, "n_samples", None) if cuts else None)


class Decoder:
    """Reads pictures that PIL has opened and not decoded yet. Threads may share it, and the pictures."""

    def __init__(self) -> None:
        # Two threads must not decode one picture at a time. Strangers that share a lock only wait.
        self._locks = tuple(Lock() for _ in range(64))

    def __call__(self, picture: Any) -> Any:
        """The picture, whole.

        Raises:
            RequestError: its file is damaged or closed.
        """
        with self._locks[id(picture) // 16 % len(self._locks)]:
            try:
                picture.load()
            # Decoders raise what they like.
            except Exception as error:
                raise RequestError(f"the picture cannot be read: {error}") from error
        return picture


def frames_per_second(processor: Any) -> float:
    """The rate at which the processor would sample a video, so at which a video's frames are taken to be sampled."""
    given = getattr(processor, "videos_kwargs", {}).get("fps")
    return float(given or getattr(getattr(processor, "video_processor", None), "fps", None) or DEFAULT_FPS)


def checked(media: Media, limits: MediaConfig, ears: Ears, decode: Decoder) -> Media:
    """The item in the form that processors take: a PIL image, frames (T, H, W, 3) uint8, or samples (S) float32.

    Raises:
        RequestError: not of a form that is taken, damaged, or larger than the limits.
    """
    if media.modality == "video":
        return Media("video", _frames(media.data, limits, decode))
    if media.modality == "audio":
        return Media("audio", _samples(media.data, limits, ears))
    _refuse_image(media.data, limits)
    return Media("image", decode(media.data))


def content_hash(media: Media, options: str) -> str:
    """Of a checked item's pixels or samples, their shape, and the processor's options."""
    data = media.data
    head = _picture_head(data) if hasattr(data, "mode") else f"{data.dtype}|{data.shape}"
    return hashlib.sha256(f"{media.modality}|{head}|{options}|".encode() + data.tobytes()).hexdigest()


def _picture_head(image: Any) -> str:
    """What says how the bytes of a PIL image are to be read."""
    return f"{image.mode}|{image.size}|{image.getpalette(None)}|{image.info.get('transparency')}"


def _refuse_image(image: Any, limits: MediaConfig) -> None:
    size = getattr(image, "size", None)
    if not isinstance(size, tuple) or not hasattr(image, "tobytes"):
        raise RequestError(f"an image must be a PIL image, not a {type(image).__name__}")
    if not all(size):
        raise RequestError(f"the image has {size[0]} x {size[1]} pixels")
    _refuse_size("image", size, limits.image.max_size)


def _refuse_size(modality: str, size: tuple[int, ...], most: Sequence[int] | None) -> None:
    if most is not None and (size[0] > most[0] or size[1] > most[1]):
        given, allowed = f"{size[0]} x {size[1]}", f"{most[0]} x {most[1]}"
        raise RequestError(f"the {modality} has {given} pixels; mm.{modality}.max_size is {allowed}")


def _frames(data: Any, limits: MediaConfig, decode: Decoder) -> np.ndarray[Any, np.dtype[np.uint8]]:
    frames = _stacked(data, decode) if isinstance(data, Sequence) else data
    if not isinstance(frames, np.ndarray) or frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3:
        what = f"{frames.dtype} of shape {frames.shape}" if isinstance(frames, np.ndarray) else type(data).__name__
        raise RequestError(f"a video must be PIL images or a uint8 array (frames, height, width, 3), not {what}")
    count, height, width, _ = frames.shape
    if not frames.size:
        raise RequestError("the video has no frames")
    most = limits.video.max_frames
    if most is not None and count > most:
        raise RequestError(f"the video has {count} frames; mm.video.max_frames is {most}")
    _refuse_size("video", (width, height), limits.video.max_size)
    return frames


def _stacked(images: Sequence[Any], decode: Decoder) -> Any:
    """PIL images of one size as an array."""
    wrong = next((image for image in images if not hasattr(image, "convert")), None)
    if wrong is not None:
        raise RequestError(f"a frame of a video must be a PIL image, not a {type(wrong).__name__}")
    if not images:
        raise RequestError("the video has no frames")
    sizes = sorted({image.size for image in images})
    if len(sizes) > 1:
        first, second = (f"{width} x {height}" for width, height in sizes[:2])
        raise RequestError(f"the frames of a video must have one size; there are {first} and {second} pixels")
    return np.stack([np.asarray(decode(image).convert("RGB")) for image in images])


def _samples(data: Any, limits: MediaConfig, ears: Ears) -> np.ndarray[Any, np.dtype[np.float32]]:
    if ears.rate is None:
        raise RequestError("the model's processor takes no audio")
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[1], Real):
        data, rate = data
        if rate != ears.rate:
            raise RequestError(f"the audio has {rate} samples a second, and the model takes {ears.rate}: resample it")
    try:
        samples = np.asarray(data)
    except (ValueError, TypeError, RuntimeError) as error:
        raise RequestError(f"audio must be one channel of floating-point samples: {error}") from error
    if samples.ndim != 1 or not samples.size or not np.issubdtype(samples.dtype, np.floating):
        raise RequestError(
            f"audio must be one channel of floating-point samples, not {samples.dtype} of shape {samples.shape}"
        )
    seconds, most = samples.size / ears.rate, limits.audio.max_seconds
    if most is not None and seconds > most:
        raise RequestError(f"the audio lasts {seconds:g} s; mm.audio.max_seconds is {most:g}")
    if ears.most_samples is not None and samples.size > ears.most_samples:
        kept = ears.most_samples / ears.rate
        raise RequestError(f"the audio lasts {seconds:g} s; the model's processor would cut it off at {kept:g} s")
    return np.ascontiguousarray(samples, dtype=np.float32)


def processor_arguments(items: Sequence[Media], rate: int | None, fps: float) -> dict[str, Any]:
    """How a processor is given checked items: by modality, each in the order of the prompt."""
    images, videos, audio = (
        [item.data for item in items if item.modality == modality] for modality in ("image", "video", "audio")
    )
    arguments: dict[str, Any] = {"images": images or None}
    if videos:
        arguments["videos"] = videos
        # Frames come sampled: a processor that sampled again would need to know what they were sampled from.
        arguments["videos_kwargs"] = {
            "do_sample_frames": False,
            "video_metadata": [_metadata(frames.shape, fps) for frames in videos],
            "return_tensors": "pt",
        }
    if audio:
        arguments |= {"audio": audio, "audio_kwargs": {"sampling_rate": rate}}
    return arguments


def _metadata(shape: tuple[int, ...], fps: float) -> dict[str, Any]:
    count, height, width, _ = shape
    return {
        "total_num_frames": count,
        "fps": fps,
        "width": width,
        "height": height,
        "duration": count / fps,
        "frames_indices": list(range(count)),
    }
