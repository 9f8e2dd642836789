"""Bytes of safetensors files into tensors that are there already, by threads that read while the device copies."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, cast

import torch

from orchestrator.device.base import Device, Lane
from orchestrator.engine.weights.files import CutOffError, RangeReader
from orchestrator.engine.weights.jobs import PAGE, Item, Job, jobs
from orchestrator.engine.weights.tally import Tally
from orchestrator.engine.weights.tuning import Tuning
from orchestrator.errors import CheckpointError
from orchestrator.events import Progress
from orchestrator.tensorfile import TensorEntry

_LOOK_S = 0.05
"""Between two looks at how far the threads are."""
_SWITCH_S = 1e-4
"""The interpreter lets a thread compute for 5 ms before another one gets its turn: longer than a read takes."""


class Transfer:
    """Threads that live as long as the `with` block and pin their buffers at its beginning.

    Each has a `Lane`: what it reads next goes into one buffer while the device copies out of the other, so host memory
    is bounded by the lanes' buffers.

    Files are read, not mapped: a mapped page would count as this process's memory and spoil the readings of a start.
    """

    def __init__(self, device: Device, tuning: Tuning, progress: Progress) -> None:
        self._device, self._tuning, self._progress = device, tuning, progress
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._tally = Tally()
        self._threads: list[threading.Thread] = []
        self._stopping = False
        self._switch_s = sys.getswitchinterval()

    def __enter__(self) -> Self:
        # Lanes have streams of their own: what they write to must not be in use by earlier work.
        self._device.synchronize()
        sys.setswitchinterval(_SWITCH_S)
        try:
            for number in range(self._tuning.threads):
                thread = threading.Thread(target=self._work, name=f"weights-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        self._stopping = True
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        sys.setswitchinterval(self._switch_s)

    def fill(self, items: Sequence[Item]) -> None:
        """Read tensors into their places; returns when they are there. Fastest in the order of the files.

        Raises:
            CheckpointError: a file ends inside a tensor or cannot be read, or a type is none that torch computes with.
        """
        try:
            for job in jobs(items, self._tuning.chunk_bytes, self._tuning.scratch_bytes):
                self._tally.add()
                self._queue.put(job)
            while not self._tally.wait(_LOOK_S):
                self._progress.advance(self._tally.take_bytes())
        except _FailedJob as failed:
            raise _explained(failed, items) from failed.__cause__
        self._progress.advance(self._tally.take_bytes())
        self._device.synchronize()

    def _work(self) -> None:
        try:
            lane = self._device.lane(self._tuning.chunk_bytes + 2 * PAGE, self._tuning.scratch_bytes)
            with torch.no_grad(), lane as own, RangeReader(direct=self._tuning.direct) as reader:
                while (job := self._queue.get()) is not None:
                    if self._stopping or self._tally.failed:
                        continue
                    _do(job, own, reader, scatter=not self._tuning.direct)
                    self._tally.done(job.nbytes)
        # Whatever it is, it ends the load: the thread that waits raises it.
        except BaseException as error:
            self._tally.fail(error)


class _FailedJob(Exception):
    def __init__(self, job: Job, offset: int | None) -> None:
        self.job, self.offset = job, offset
        super().__init__(str(job.file))


def _do(job: Job, lane: Lane, reader: RangeReader, *, scatter: bool) -> None:
    try:
        if scatter and all(piece.target.is_cpu and not piece.converted for piece in job.pieces):
            reader.scatter(job.file, job.start, [_bytes_of(piece.target) for piece in job.pieces])
            return
        buffer = lane.buffer()
        lead = reader.read(job.file, job.start, job.stop, buffer.view)
    except CutOffError as error:
        raise _FailedJob(job, error.offset) from error
    except OSError as error:
        raise _FailedJob(job, None) from error
    for piece in job.pieces:
        begin = lead + piece.start - job.start
        lane.copy(piece.target, buffer.tensor[begin : begin + piece.stop - piece.start], piece.stored)


def _bytes_of(target: torch.Tensor) -> memoryview:
    return memoryview(cast(Any, target.numpy()))


def _explained(failed: _FailedJob, items: Sequence[Item]) -> CheckpointError:
    offset = failed.job.start if failed.offset is None else failed.offset
    entry = _entry_at(failed.job, offset, [entry for entry, _ in items])
    where = f"the tensor '{entry.name}'"
    if failed.offset is not None:
        return CheckpointError(f"{entry.file}: cut off inside {where}; copy or download the file again")
    return CheckpointError(f"{entry.file}: cannot be read at {where}: {failed.__cause__}")


def _entry_at(job: Job, offset: int, entries: Sequence[TensorEntry]) -> TensorEntry:
    return next(entry for entry in entries if entry.file == job.file and entry.start <= offset < entry.end)
