"""What operations take of a CUDA device beside their results: workspaces, and attention as the real kernels do it.

Sources: torch 2.11, `aten/src/ATen/native/transformers/cuda/attention.cu` and `sdp_utils.cpp` (which kernel runs, and
its outputs), `aten/src/ATen/cuda/CUDABlas.cpp` (workspaces).
"""

from __future__ import annotations

from typing import Any

import torch

_aten: Any = torch.ops.aten
ATTENTION = _aten.scaled_dot_product_attention.default
INDEX = _aten.index.Tensor
JOIN = _aten.cat.default
LINEAR = _aten.linear.default
NOT_KERNELS = frozenset(
    {_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default}
)
"""Operations that only allocate."""
DATA_DECIDES = frozenset(
    {
        _aten.nonzero.default,
        _aten.masked_select.default,
        _aten.unique_consecutive.default,
        _aten._unique2.default,
        _aten.repeat_interleave.Tensor,
        _aten.bincount.default,
    }
)
"""Operations whose results have sizes that data decide."""

RESIZE = torch.nn.functional.interpolate
_ONE_KERNEL = frozenset({"bilinear", "bicubic"})
"""Ways of resizing that a GPU has a kernel for, and that are put together of many operations elsewhere."""

_FACTORIES = frozenset(
    {_aten.arange.default, _aten.arange.start, _aten.arange.start_step, _aten.zeros.default, _aten.full.default}
    | {_aten.ones.default, _aten.scalar_tensor.default}
)
_PRODUCTS = frozenset({_aten.mm.default, _aten.mm.out, _aten.bmm.default, _aten.baddbmm.default})
_ADDED = _aten.addmm.default
_SORTS = frozenset({_aten.sort.default, _aten.sort.stable})
_SHORT = 4096
"""Elements of a row up to which it is sorted in place."""
_SORTED_BYTES = 32


def makes_integers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a factory makes whole numbers, of which some size or loop may depend."""
    if func not in _FACTORIES:
        return False
    dtype = kwargs.get("dtype")
    if dtype is not None:
        return not (dtype.is_floating_point or dtype.is_complex)
    numbers = [value for value in args if not isinstance(value, list)]
    return func not in (_aten.zeros.default, _aten.ones.default) and all(isinstance(value, int) for value in numbers)


def is_flash(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether attention without a mask goes through FlashAttention 2, on cards of capability 8.0 and newer."""
    return query.element_size() == 2 and max(query.shape[-1], value.shape[-1]) <= 256


def flash_attention(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """(batch, heads, queries, head size), in memory with the queries before the heads."""
    batch, heads, rows, width = query.shape
    output = torch.empty((batch, rows, heads, width), dtype=query.dtype, device="meta").transpose(1, 2)
    return output[..., : value.shape[-1]] if value.shape[-1] != query.shape[-1] else output


def flash_sums_bytes(query: torch.Tensor) -> int:
    """Of a float32 for each row and head."""
    batch, heads, rows, _ = query.shape
    return batch * heads * rows * 4


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The result of the memory-efficient kernel: with a mask, or in 32 bits."""
    batch, heads, rows, _ = query.shape
    if enable_gqa and key.shape[1] != heads:
        groups = heads // key.shape[1]
        key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    if attn_mask is not None:
        _prepared_mask(attn_mask, query)
    return torch.empty((batch, rows, heads, value.shape[-1]), dtype=query.dtype, device="meta").transpose(1, 2)


def _prepared_mask(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """A mask as the kernel takes it: numbers of the query's type, rows that begin at multiples of 16 elements."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask, 0.0)
    if mask.shape[-1] % 16:
        mask = torch.nn.functional.pad(mask, (0, 16 - mask.shape[-1] % 16))
    return mask


def library_of(func: Any, args: tuple[Any, ...]) -> str | None:
    """The library that an operation calls, of those that keep a workspace."""
    if func in _PRODUCTS:
        return "cublas"
    if func is _ADDED:
        # A row added to a product goes through cuBLASLt; anything else that is added does not.
        return "cublaslt" if args[0].ndim == 1 else "cublas"
    return None


def scratch_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """What an operation takes while it runs. Long rows are sorted with copies of keys and places: 32 bytes an
    element, as an H200 showed for float32."""
    if func not in _SORTS or not args[0].numel() or args[0].shape[-1] <= _SHORT:
        return 0
    return _SORTED_BYTES * int(args[0].numel())


def resized(
    picture: torch.Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest", *_: Any, **__: Any
) -> torch.Tensor | None:
    """The result of the kernel that resizes pictures (pictures, channels, height, width); None where it is another."""
    if picture.ndim != 4 or not picture.is_meta or mode not in _ONE_KERNEL:
        return None
    given = scale_factor if size is None else size
    pair = given if isinstance(given, list | tuple | torch.Size) else (given, given)
    sides = (
        pair if size is not None else (int(side * scale) for side, scale in zip(picture.shape[-2:], pair, strict=True))
    )
    return picture.new_empty((*picture.shape[:2], *(int(side) for side in sides)))
