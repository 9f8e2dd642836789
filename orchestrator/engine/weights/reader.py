"""Bytes from safetensors files into tensors that are there already."""

from __future__ import annotations

from types import TracebackType
from typing import IO, Any, cast

import torch

from orchestrator.errors import CheckpointError
from orchestrator.events import Progress
from orchestrator.tensorfile import TensorEntry
from orchestrator.units import MiB

_CHUNK_BYTES = 64 * MiB
_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class TensorReader:
    """Reads tensors one after another; fastest in the order of the files.

    Files are read, not mapped: a mapped page would count as this process's memory and spoil the readings of a start.
    Beside the target, at most one chunk of 64 MiB is held, and only where the type or the device differs.
    """

    def __init__(self, progress: Progress, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._progress, self._chunk_bytes = progress, chunk_bytes
        self._stream: IO[bytes] | None = None
        self._open_path = ""
        self._staging = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            self._stream.close()

    def read_into(self, entry: TensorEntry, target: torch.Tensor) -> None:
        """Read a tensor into `target`, contiguous and of the same shape, on any device and of any type.

        Raises:
            CheckpointError: the file ends inside the tensor, or its type is none that torch computes with.
        """
        stored = self._type(entry)
        flat = target.detach().reshape(-1)
        stream = self._at(entry)
        step = self._chunk_bytes // stored.itemsize
        for start in range(0, flat.numel(), step):
            part = flat[start : start + step]
            if part.device.type == "cpu" and part.dtype == stored:
                self._read(stream, part, entry)
            else:
                chunk = self._staged(part.numel(), stored)
                self._read(stream, chunk, entry)
                part.copy_(chunk)
            self._progress.advance(part.numel() * stored.itemsize)

    def read(self, entry: TensorEntry, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """A new tensor on `device`."""
        target = torch.empty(entry.shape, device=device, dtype=dtype)
        self.read_into(entry, target)
        return target

    def _type(self, entry: TensorEntry) -> torch.dtype:
        if entry.dtype not in _TYPES:
            raise CheckpointError(
                f"{entry.file}: the tensor '{entry.name}' has the type {entry.dtype}, which is not supported; "
                f"{', '.join(_TYPES)} are"
            )
        return _TYPES[entry.dtype]

    def _at(self, entry: TensorEntry) -> IO[bytes]:
        if self._stream is None or self._open_path != str(entry.file):
            if self._stream is not None:
                self._stream.close()
            self._stream, self._open_path = entry.file.open("rb", buffering=0), str(entry.file)
        self._stream.seek(entry.start)
        return self._stream

    def _staged(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        size = count * dtype.itemsize
        if self._staging.numel() < size:
            self._staging = torch.empty(size, dtype=torch.uint8)
        return self._staging[:size].view(dtype)

    def _read(self, stream: IO[bytes], target: torch.Tensor, entry: TensorEntry) -> None:
        view = memoryview(cast(Any, target.view(torch.uint8).numpy()))
        while len(view):
            count = stream.readinto(view)  # type: ignore[attr-defined]
            if not count:
                raise CheckpointError(
                    f"{entry.file}: cut off inside the tensor '{entry.name}'; copy or download the file again"
                )
            view = view[count:]
