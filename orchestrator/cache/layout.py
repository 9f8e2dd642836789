"""How an entry lies in its file, and reading one back. Nothing here needs torch until a tensor is asked for."""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from dataclasses import dataclass
from io import BufferedReader
from typing import TYPE_CHECKING, Any

from orchestrator.errors import CacheError

if TYPE_CHECKING:
    import torch

MAGIC = b"orchestrator-cache"
VERSION = 2
DIGEST_AT = 32
PAYLOAD_AT = DIGEST_AT + hashlib.sha256().digest_size
"""64: tensors begin where their elements are aligned, because safetensors pads its header to 8 bytes."""

OTHER_KEY = "it was written for another key"

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


@dataclass(frozen=True)
class Header:
    """What a file says of itself. `tensors`: name to the format's name of a type, shape, first byte and end in the
    file."""

    key: str
    meta: dict[str, Any]
    tensors: dict[str, tuple[str, tuple[int, ...], int, int]]


def read_header(file: BufferedReader, *, checked: bool = True) -> Header:
    """
    Args:
        checked: whether to read all of the file and compare it with its checksum.

    Raises:
        CacheError: not what this cache wrote; says what is wrong.
    """
    file.seek(0)
    head = file.read(PAYLOAD_AT)
    if not head.startswith(MAGIC) or len(head) < PAYLOAD_AT:
        raise CacheError("it has no header of this cache")
    if head[len(MAGIC)] != VERSION:
        raise CacheError(f"it has format version {head[len(MAGIC)]}, and this program reads {VERSION}")
    if checked and hashlib.file_digest(file, "sha256").digest() != head[DIGEST_AT:]:
        raise CacheError("its bytes are not those that were written")
    size = file.seek(0, 2)
    file.seek(PAYLOAD_AT)
    length = int.from_bytes(file.read(8), "little")
    start = PAYLOAD_AT + 8 + length
    if start > size:
        raise CacheError("its bytes are not those that were written")
    try:
        header = json.loads(file.read(length))
        said = header.pop("__metadata__")
        key, meta = said["key"], json.loads(said["meta"])
        tensors = {name: _placed(fields, start, size) for name, fields in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CacheError(f"it cannot be read ({error})") from error
    if not isinstance(key, str) or not isinstance(meta, dict):
        raise CacheError("it cannot be read (its key or its JSON is of another kind)")
    return Header(key, meta, tensors)


def map_tensors(file: BufferedReader, header: Header) -> dict[str, torch.Tensor]:
    """The tensors of a file whose header was read, in the file's own pages. The file may be closed and deleted."""
    import torch

    found: dict[str, torch.Tensor] = {}
    # Copy on write, so that torch has memory that it may write to and the file stays as it is.
    pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    for name, (dtype_name, shape, start, stop) in header.tensors.items():
        dtype = getattr(torch, _DTYPES[dtype_name])
        if start == stop:
            found[name] = torch.empty(shape, dtype=dtype)
        else:
            flat = torch.frombuffer(pages, dtype=dtype, count=math.prod(shape), offset=start)
            found[name] = flat.reshape(shape)
    return found


def _placed(fields: dict[str, Any], base: int, size: int) -> tuple[str, tuple[int, ...], int, int]:
    dtype, shape = fields["dtype"], tuple(int(length) for length in fields["shape"])
    start, stop = (base + int(offset) for offset in fields["data_offsets"])
    if dtype not in _DTYPES or min(shape, default=0) < 0 or not base <= start <= stop <= size:
        raise ValueError(f"a tensor of type {dtype} and shape {shape} at bytes {start} to {stop}")
    if stop - start != math.prod(shape) * _element_bytes(dtype):
        raise ValueError(f"a tensor of type {dtype} and shape {shape} in {stop - start} bytes")
    return dtype, shape, start, stop


def _element_bytes(dtype: str) -> int:
    """Of a type such as BF16 or F8_E4M3, whose name has its bits."""
    digits = "".join(character for character in dtype.partition("_")[0] if character.isdigit())
    return 1 if dtype == "BOOL" else int(digits) // 8
