"""What one thread does in one go: a range of a file, and where its bytes go. Nothing is read here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from orchestrator.errors import CheckpointError
from orchestrator.tensorfile import TensorEntry

PAGE = 4096
"""Ranges are cut here, so that they can be read past the page cache."""
_MOST_PIECES = 512
"""Of one job: the operating system takes 1,024 places in one call."""
_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip

Item = tuple[TensorEntry, torch.Tensor]
"""A tensor of a file and where it goes: contiguous, of the same shape, of any type and device."""


@dataclass(frozen=True)
class Piece:
    """The bytes from `start` to `stop` of a file, and the one-dimensional tensor that they fill.

    `stored` is their element type; `uint8` with a target of bytes means that they are taken as they are.
    """

    file: Path
    start: int
    stop: int
    target: torch.Tensor
    stored: torch.dtype

    @property
    def converted(self) -> bool:
        return self.stored != self.target.dtype

    def part(self, start: int, stop: int) -> Piece:
        first, last = (start - self.start) // self.stored.itemsize, (stop - self.start) // self.stored.itemsize
        return Piece(self.file, start, stop, self.target[first:last], self.stored)


@dataclass(frozen=True)
class Job:
    """Pieces that lie side by side in one file."""

    pieces: tuple[Piece, ...]

    @property
    def file(self) -> Path:
        return self.pieces[0].file

    @property
    def start(self) -> int:
        return self.pieces[0].start

    @property
    def stop(self) -> int:
        return self.pieces[-1].stop

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def stored_type(entry: TensorEntry) -> torch.dtype:
    """
    Raises:
        CheckpointError: a type that torch does not compute with.
    """
    if entry.dtype not in _TYPES:
        raise CheckpointError(
            f"{entry.file}: the tensor '{entry.name}' has the type {entry.dtype}, which is not supported; "
            f"{', '.join(_TYPES)} are"
        )
    return _TYPES[entry.dtype]


def jobs(items: Iterable[Item], chunk_bytes: int, converted_bytes: int) -> Iterator[Job]:
    """Cut what is to be read into jobs.

    Args:
        items: in the order of the files, for jobs as large as they may be.
        chunk_bytes: most bytes of a job; at least a page.
        converted_bytes: most bytes of a piece whose type changes; at least 8.
    """
    pieces: list[Piece] = []
    for piece in _merged(items):
        at = piece.start
        while at < piece.stop:
            if pieces and (pieces[-1].stop != at or pieces[-1].file != piece.file or len(pieces) == _MOST_PIECES):
                yield Job(tuple(pieces))
                pieces = []
            room = chunk_bytes - (at - pieces[0].start if pieces else 0)
            stop = _cut(piece, at, room, converted_bytes)
            if stop > at:
                pieces.append(piece.part(at, stop))
            # What does not end with its tensor has filled its job, or cannot be longer.
            if pieces and stop < piece.stop and not (piece.converted and room > converted_bytes):
                yield Job(tuple(pieces))
                pieces = []
            at = stop
    if pieces:
        yield Job(tuple(pieces))


def _cut(piece: Piece, at: int, room: int, converted_bytes: int) -> int:
    """Where the part of `piece` from `at` on ends, so that it fits into `room` bytes; `at` if nothing of it does."""
    if piece.converted:
        length = min(room, converted_bytes, piece.stop - at)
        return at + length - length % piece.stored.itemsize
    stop = min(at + room, piece.stop)
    on_page = stop - stop % PAGE
    return stop if stop == piece.stop or on_page <= at else on_page


def _merged(items: Iterable[Item]) -> Iterator[Piece]:
    """A piece for each tensor, or for each row of them that lie side by side in the file and on the device."""
    last: Piece | None = None
    for entry, tensor in items:
        if not entry.nbytes:
            continue
        piece = _piece(entry, tensor)
        if last is not None and _continues(last, piece):
            last = Piece(last.file, last.start, piece.stop, _longer(last.target, piece.stop - last.start), torch.uint8)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def _piece(entry: TensorEntry, tensor: torch.Tensor) -> Piece:
    stored, flat = stored_type(entry), tensor.detach().reshape(-1)
    if stored == flat.dtype:
        return Piece(entry.file, entry.start, entry.end, flat.view(torch.uint8), torch.uint8)
    return Piece(entry.file, entry.start, entry.end, flat, stored)


def _continues(last: Piece, piece: Piece) -> bool:
    return (
        not last.converted
        and not piece.converted
        and last.file == piece.file
        and last.stop == piece.start
        and last.target.data_ptr() + last.target.numel() == piece.target.data_ptr()
        and last.target.untyped_storage().data_ptr() == piece.target.untyped_storage().data_ptr()
    )


def _longer(target: torch.Tensor, size: int) -> torch.Tensor:
    return torch.as_strided(target, (size,), (1,), target.storage_offset())
