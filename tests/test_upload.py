"""A step's numbers in one copy: values, shapes and types as they were, each where kernels may take it for aligned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from orchestrator.engine.upload import Uploader

ARRAYS: list[Any] = [
    np.arange(5, dtype=np.int64),
    np.zeros(0, np.int64),
    np.array([[1, 2, 3], [4, 5, 6]], np.int32),
    np.array([7], np.int32),
    np.array([-1, 2**40], np.int64),
]


def test_arrays_arrive_as_they_were() -> None:
    for array, tensor in zip(ARRAYS, Uploader("cpu")(*ARRAYS), strict=True):
        assert tensor.tolist() == array.tolist()
        assert tensor.shape == array.shape
        assert str(tensor.dtype) == f"torch.{array.dtype}"


def test_all_of_them_are_one_copy_of_aligned_parts() -> None:
    pinned: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor)
        return tensor

    tensors = Uploader("cpu", pin)(*ARRAYS)
    (whole,) = pinned
    begins = [tensor.data_ptr() - whole.data_ptr() for tensor in tensors if tensor.numel()]
    assert begins == sorted(begins)
    assert all(begin % 16 == 0 for begin in begins)


@pytest.mark.parametrize("rows", [np.array([[1, 2], [3, 4], [5, 6]], np.int64).T, np.arange(8, dtype=np.int32)[::2]])
def test_an_array_need_not_lie_in_one_piece(rows: Any) -> None:
    (tensor,) = Uploader("cpu")(rows)
    assert tensor.tolist() == rows.tolist()
