"""What the built-in profilers share: the limits as numbers, and blank items."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import floor
from typing import Any

from orchestrator.modality.base import ItemSpec, ModalityProfiler
from orchestrator.modality.blank import blank
from orchestrator.modality.search import Size, bounded, candidate_sizes, most_that_fit, refined


class LimitedProfiler(ModalityProfiler):
    """The limits as numbers, and blank items."""

    def build(self, spec: ItemSpec) -> Any:
        return blank(spec)

    def _image_limit(self) -> Size | None:
        most = self.limits.image.max_size
        return None if most is None else (most[0], most[1])

    def _video_limit(self) -> Size | None:
        most = self.limits.video.max_size
        return None if most is None else (most[0], most[1])

    def _sampling_rate(self) -> int:
        return int(self.option("audio_kwargs", "sampling_rate"))

    def _longest_audio(self) -> int:
        """Samples that limits, window and a sequence of tokens of a second or less have room for."""
        room = None if self.max_tokens is None else self.max_tokens * self._sampling_rate()
        return bounded("recording", "mm.audio.max_seconds", self._most_samples(), self._window(), room)

    def _most_samples(self) -> int | None:
        seconds = self.limits.audio.max_seconds
        return None if seconds is None else max(1, floor(seconds * self._sampling_rate()))

    def _window(self) -> int | None:
        """Samples that the feature extractor takes of a recording; None where it does not cut off what is longer."""
        if self.option("audio_kwargs", "truncation", True) is False:
            return None
        samples = self.option("audio_kwargs", "n_samples")
        return None if samples is None else int(samples)


class BuiltInProfiler(LimitedProfiler):
    """A profiler whose `tokens` is arithmetic on the processor's options. It gives 0 for what the processor refuses.

    A family writes the rule of each modality in its `modalities`; no other is asked for.
    """

    def tokens(self, modality: str, shape: tuple[int, ...]) -> int:
        rules: dict[str, Callable[..., int]] = {
            "image": self._image_tokens,
            "video": self._video_tokens,
            "audio": self._audio_tokens,
        }
        return rules[modality](*shape)

    def costliest(self, modality: str) -> ItemSpec:
        shape = {"image": self._image, "video": self._video, "audio": self._audio}[modality]()
        return ItemSpec(modality, shape, self.tokens(modality, shape))

    def _image_tokens(self, width: int, height: int) -> int:
        raise NotImplementedError

    def _video_tokens(self, frames: int, width: int, height: int) -> int:
        raise NotImplementedError

    def _audio_tokens(self, samples: int) -> int:
        raise NotImplementedError

    def _image(self) -> tuple[int, ...]:
        most = self._image_limit()
        return refined(self._image_tokens, candidate_sizes(most), most, self.max_tokens)

    def _video(self) -> tuple[int, ...]:
        """As many frames as may be, of the size that costs most; for families whose frames cost the same in any
        number."""
        size = self._frame_size()
        frames = bounded("video", "mm.video.max_frames", self.limits.video.max_frames, self.max_tokens)
        return (most_that_fit(lambda count: self._video_tokens(count, *size), frames, self.max_tokens), *size)

    def _audio(self) -> tuple[int, ...]:
        samples = self._longest_audio()
        return (most_that_fit(self._audio_tokens, samples, self.max_tokens),)

    def _frame_size(self) -> Size:
        """Square, as the largest input of an encoder that scales frames to one length of the longer side."""
        most = self._video_limit()
        side = frame_side(self)
        return (side, side) if most is None else (min(side, *most), min(side, *most))


def frame_side(profiler: ModalityProfiler) -> int:
    """Pixels to which the processor scales a side of a video's frames."""
    size = profiler.option("videos_kwargs", "size")
    sides = (size_entry(size, name) for name in ("height", "longest_edge", "shortest_edge"))
    return next((side for side in sides if side is not None), 448)


def size_entry(size: Any, name: str) -> int | None:
    """A number of a processor's `size`, which is a dict or an object; None where it has none."""
    found = size.get(name) if isinstance(size, Mapping) else getattr(size, name, None)
    return None if found is None else int(found)
