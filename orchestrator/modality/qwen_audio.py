"""Audio of Qwen2-Audio and Qwen2.5-Omni: two halvings of the frames of a spectrogram, as long as the window allows."""

from __future__ import annotations

from math import ceil
from typing import ClassVar

from orchestrator.modality.built_in import BuiltInProfiler
from orchestrator.modality.qwen_vl import QwenVLProfiler


class Qwen2AudioProfiler(BuiltInProfiler):
    """Recordings of Qwen2-Audio. Its encoder takes one window, 30 s by default, and its processor cuts off the rest."""

    modalities: ClassVar[tuple[str, ...]] = ("audio",)

    def _audio_tokens(self, samples: int) -> int:
        taken = min(samples, self._window() or samples)
        frames = ceil(taken / int(self.option("audio_kwargs", "hop_length")))
        halved = (frames - 1) // 2 + 1
        return max(0, (halved - 2) // 2 + 1)


class Qwen25OmniProfiler(QwenVLProfiler, Qwen2AudioProfiler):
    """Images and videos as Qwen2.5-VL's, recordings as Qwen2-Audio's in a window of the processor's length."""

    modalities: ClassVar[tuple[str, ...]] = ("image", "video", "audio")
