"""What an engine must be able to do for kernels to be loaded while its weights are read."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class LoadsKernels(Protocol):
    """An engine without loads each kernel when it first runs."""

    def load_kernels(self) -> str | None:
        """Do, in the calling thread while `load` fills the weights in another, what `compile_kernels` would do later.
        Leaves nothing on the device. Only a device that works aside does it; others return at once.

        Returns:
            What went wrong, if anything did: it is no reason to stop.
        """
