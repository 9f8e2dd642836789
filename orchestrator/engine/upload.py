"""A step's numbers to the device: all of them in one copy that nobody waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Numbers = np.ndarray[Any, np.dtype[np.int32]] | np.ndarray[Any, np.dtype[np.int64]]

_WORDS = 2
"""Each array begins at a multiple of so many int64, 16 bytes: kernels are compiled by whether their pointers do."""


class Uploader:
    """Copies arrays of integers to one device.

    Args:
        pin: see `Device`.
    """

    def __init__(self, torch_device: str, pin: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor) -> None:
        self._torch_device, self._pin = torch_device, pin

    def __call__(self, *arrays: Numbers) -> list[torch.Tensor]:
        """The arrays as tensors of their shapes and types, all of them views of one."""
        words = [-(-array.nbytes // (8 * _WORDS)) * _WORDS for array in arrays]
        whole = np.zeros(sum(words), np.int64)
        begins = np.cumsum([0, *words])
        for array, begin, count in zip(arrays, begins, words, strict=False):
            whole[begin : begin + count].view(array.dtype)[: array.size] = array.reshape(-1)
        on_device = self._pin(torch.from_numpy(whole)).to(self._torch_device, non_blocking=True)
        parts = torch.split(on_device, words)
        return [_like(part, array) for part, array in zip(parts, arrays, strict=True)]


def _like(words: torch.Tensor, array: Numbers) -> torch.Tensor:
    dtype = torch.int32 if array.dtype == np.int32 else torch.int64
    return words.view(dtype)[: array.size].view(array.shape)
