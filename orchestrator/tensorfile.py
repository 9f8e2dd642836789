"""The headers of safetensors files: which tensors, of which type and shape, at which bytes. No tensor is read here."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import CheckpointError

ELEMENT_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
FLOAT_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
FLOAT8 = frozenset({"F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F6_E2M3", "F6_E3M2", "F4"})
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class Place:
    """Where in a model a tensor of a file goes: the name of the model's tensor, and the row of it where the bytes
    begin; None where they are all of it."""

    name: str
    first_row: int | None = None


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file, or some rows of it.

    `start` and `end` are offsets in bytes from the start of the file; `dtype` is the format's name, such as BF16;
    `place` is known where a layout says it, else the loader finds it by the name.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int
    place: Place | None = None

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def read_headers(files: Sequence[Path]) -> tuple[TensorEntry, ...]:
    """The tensors of several files, one file after the other.

    Raises:
        CheckpointError: as `read_header`, or a tensor is in two of the files.
    """
    entries = tuple(entry for file in files for entry in read_header(file))
    first: dict[str, TensorEntry] = {}
    for entry in entries:
        if (other := first.setdefault(entry.name, entry)) is not entry:
            raise CheckpointError(
                f"{entry.file}: has the tensor '{entry.name}', and {other.file.name} has it too; copy or download the "
                "files of one model, with their index"
            )
    return entries


def read_header(file: Path) -> tuple[TensorEntry, ...]:
    """The tensors of a file, in the order of their bytes.

    Raises:
        CheckpointError: not a safetensors file, or one that is shorter than its header says; names the first tensor
            whose bytes are not all there.
    """
    size = file.stat().st_size
    base, header = _header(file, size)
    header.pop("__metadata__", None)
    try:
        entries = [_entry(name, fields, file, base) for name, fields in header.items()]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file}: not a safetensors file: its header has a wrong entry ({error}); copy or download it again"
        ) from None
    entries.sort(key=lambda entry: (entry.start, entry.end))
    _refuse_torn(entries, file, base, size)
    return tuple(entries)


def _refuse_torn(entries: Sequence[TensorEntry], file: Path, base: int, size: int) -> None:
    """The format has no gaps: each tensor begins where the one before it ends, and the last ends with the file."""
    at = base
    for entry in entries:
        if entry.end > size:
            raise CheckpointError(
                f"{file}: cut off: the tensor '{entry.name}' ends at byte {entry.end} and the file has {size}; "
                "copy or download the file again"
            )
        if entry.start != at:
            raise CheckpointError(
                f"{file}: not a safetensors file: the tensor '{entry.name}' begins at byte {entry.start}, and what is "
                f"before it ends at byte {at}; copy or download the file again"
            )
        at = entry.end
    if at != size:
        raise CheckpointError(
            f"{file}: not a safetensors file: its last tensor ends at byte {at} and the file has {size}; copy or "
            "download the file again"
        )


def _header(file: Path, size: int) -> tuple[int, dict[str, Any]]:
    """The offset at which the tensors' bytes begin, and the header."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        base = _LENGTH_BYTES + length
        if size < _LENGTH_BYTES or base > size or length > _MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{file}: cut off or not a safetensors file: its header would end at byte {base} and the file has "
                f"{size}; copy or download the file again"
            )
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            header = None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: not a safetensors file: its header is not JSON; copy or download it again")
    return base, header


def _entry(name: str, fields: dict[str, Any], file: Path, base: int) -> TensorEntry:
    dtype, shape = fields["dtype"], tuple(fields["shape"])
    start, end = fields["data_offsets"]
    if not isinstance(dtype, str) or any(type(number) is not int or number < 0 for number in (*shape, start, end)):
        raise ValueError(f"'{name}' has the type {dtype}, the shape {fields['shape']} and the bytes {start} to {end}")
    if end < start:
        raise ValueError(f"'{name}' has the bytes {start} to {end}")
    expected = math.prod(shape) * ELEMENT_BYTES[dtype] if dtype in ELEMENT_BYTES else end - start
    if end - start != expected:
        raise ValueError(f"'{name}' has {end - start} bytes where its type and shape need {expected}")
    return TensorEntry(name, dtype, shape, file, base + start, base + end)


def find_weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a model folder, in the order of its index; empty where there is none.

    Raises:
        CheckpointError: the index is not one, or names a file that is not there; or several files and no index.
    """
    if (folder / INDEX_NAME).is_file():
        return tuple(folder / name for name in _shards(folder))
    if (folder / SINGLE_NAME).is_file():
        return (folder / SINGLE_NAME,)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) > 1:
        raise CheckpointError(
            f"{folder}: has {len(files)} safetensors files and no {INDEX_NAME} that says which belong to the model; "
            "copy or download the index too"
        )
    return tuple(files)


def _shards(folder: Path) -> list[str]:
    index = folder / INDEX_NAME
    try:
        names = list(dict.fromkeys(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        raise CheckpointError(f"{index}: not an index: it has no weight_map; copy or download it again") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index}: names '{name}', which is not a file of its own folder")
    if missing := [name for name in names if not (folder / name).is_file()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{index}: names {missing[0]}{more}, which is not there; copy or download it")
    return names
