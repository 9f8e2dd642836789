"""What an engine must be able to do for kernels to be loaded while its weights are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from orchestrator.cache import Entry


@dataclass(frozen=True)
class KnownStep:
    """What an earlier start learned of the encoder.

    Attributes:
        step: of `RemembersSteps.remembered_step`.
        micro_batch: items of one call of the encoder, by modality.
        piece_tokens: encoder tokens of a call, where an item is cut.
        peak_bytes: what the encoder took at its worst.
    """

    step: Entry
    micro_batch: Mapping[str, int]
    piece_tokens: Mapping[str, int]
    peak_bytes: int


@runtime_checkable
class LoadsKernels(Protocol):
    """An engine without loads each kernel when it first runs."""

    def load_kernels(self, sizes: Sequence[int], known: Callable[[], KnownStep | None]) -> str | None:
        """Run, in the calling thread while `load` fills the weights in another, what later steps run, so that they find
        its kernels loaded. Leaves nothing on the device. Only a device that works aside does it; others return at once.

        Args:
            sizes: rows of decode steps to come.
            known: asked once the language model's kernels are loaded; None where nothing is known of the encoder.

        Returns:
            What went wrong, if anything did: it is no reason to stop.
        """
