"""A SentencePiece model file, read as far as a tokenizer needs it.

The file is a protocol buffer (sentencepiece_model.proto in google/sentencepiece): fields with a number and one of a few
wire types, after https://protobuf.dev/programming-guides/encoding. Reading it here takes neither of the two packages
that transformers would ask for.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from orchestrator.errors import CheckpointError

_BPE = 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3


class Kind(IntEnum):
    """What a piece of the vocabulary is."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Piece(NamedTuple):
    """One entry of the vocabulary; its identifier is its place. Of two merges that with the greater score is made."""

    text: str
    score: float
    kind: Kind


@dataclass(frozen=True)
class SentencePiece:
    """A model of byte pairs.

    Attributes:
        pieces: the vocabulary.
        bytes_for_unknown: whether a character that is no piece becomes its bytes.
        leading_blank: whether a text gets a blank in front.
        no_extra_blanks: whether blanks at the ends go and those within become one.
        characters: the table that characters are normalised by, in the library's own format; empty for none.
    """

    pieces: tuple[Piece, ...]
    bytes_for_unknown: bool
    leading_blank: bool
    no_extra_blanks: bool
    characters: bytes


def read(path: Path) -> SentencePiece:
    """
    Raises:
        CheckpointError: not such a file, cut off, or of another kind than byte pairs.
    """
    try:
        return _model(path.read_bytes())
    except (ValueError, IndexError, struct.error) as error:
        raise CheckpointError(f"{path}: not a SentencePiece model of byte pairs ({error})") from None


def _model(data: bytes) -> SentencePiece:
    pieces: list[Piece] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in _fields(data):
        if isinstance(value, int):
            continue
        if number == _PIECES:
            pieces.append(_piece(dict(_fields(value))))
        elif number == _TRAINER:
            trainer = dict(_fields(value))
        elif number == _NORMALIZER:
            normalizer = dict(_fields(value))
    if not pieces or trainer.get(3, 1) != _BPE:
        raise ValueError("it has no pieces" if not pieces else "its model_type is another")
    table = normalizer.get(2, b"")
    return SentencePiece(
        pieces=tuple(pieces),
        bytes_for_unknown=bool(trainer.get(35, 0)),
        leading_blank=bool(normalizer.get(3, 1)),
        no_extra_blanks=bool(normalizer.get(4, 1)),
        characters=table if isinstance(table, bytes) else b"",
    )


def _piece(fields: dict[int, int | bytes]) -> Piece:
    text, score, kind = fields.get(1, b""), fields.get(2, b"\0\0\0\0"), fields.get(3, Kind.NORMAL)
    if not isinstance(text, bytes) or not isinstance(score, bytes) or not isinstance(kind, int):
        raise ValueError("a piece has a field of another type")
    return Piece(text.decode(), struct.unpack("<f", score)[0], Kind(kind))


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field: an int for varints, the bytes for the rest."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == _BYTES:
            size, at = _varint(data, at)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"a field of the unknown wire type {wire}")
        if at + size > len(data):
            raise ValueError("it is cut off")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Seven bits a byte, the lowest first; the highest bit of a byte says that another follows."""
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("it is cut off")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
