"""Torch's libraries and the device, made ready while modules are imported; and what ran beside what, for the record."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack

from orchestrator.beside import Beside, begin_or_do
from orchestrator.config import Config
from orchestrator.device.base import Device
from orchestrator.events import Events
from orchestrator.importing import import_all, link_torch
from orchestrator.opening import Place, open_device
from orchestrator.records import RunRecord, Span

_WORTH_NAMING_S = 1e-3
_WITHOUT_TORCH, _OF_PYTHON_ALONE = "transformers", "transformers.models"
"""What the engines that are built in import, and can be imported before torch. The second looks through its own files
for as long as linking takes; the first loads libraries, which would wait for torch's."""


def import_torch(beside: Beside, *, with_transformers: bool) -> None:
    """Import it, while what needs no torch is imported if it is going to be needed."""
    if with_transformers and "torch" not in sys.modules:
        import_all([_WITHOUT_TORCH])
        linked = begin_or_do(beside, "link torch", link_torch)
        import_all([_OF_PYTHON_ALONE])
        linked()
    import_all(["torch"])


def device_beside(
    beside: Beside,
    choose: Callable[[Config], Device],
    config: Config,
    run_dir: str,
    events: Events,
    cleanup: ExitStack,
) -> Callable[[], tuple[Device, Place]]:
    """Begin to open the device; what waits for it, and makes it the calling thread's own.

    Only a GPU is opened beside: its readings are the driver's. On a CPU the resident set is the reading, and what is
    being imported would be taken for the start's. To be called once torch is imported.

    Args:
        cleanup: gets what closes the device and takes back its promise.
    """

    def chosen() -> Device:
        device = choose(config)
        cleanup.callback(device.close)
        return device

    def opened(device: Device) -> Place:
        place = open_device(device, config, run_dir, events)
        cleanup.callback(place.close)
        return place

    def work() -> tuple[Device, Place | None]:
        device = chosen()
        return device, opened(device) if device.info().kind == "cuda" else None

    task = beside.begin("open device", lambda _: work()) if config.device.kind in ("auto", "cuda") else None

    def wait() -> tuple[Device, Place]:
        device, place = task.result() if task is not None else (chosen(), None)
        if place is None:
            return device, opened(device)
        # A thread has a current device of its own.
        device.open()
        return device, place

    return wait


def tell_neighbours(record: RunRecord, spans: Iterable[Span]) -> None:
    """Put `spans` of work beside into the record, each with the intervals that it ran beside; and the same of what a
    stage did before its turn."""
    intervals = [(span.name, span.start_s, span.wall_s) for span in record.spans if span.beside is None]
    intervals += [(stage.slot, stage.start_s, stage.wall_s or 0.0) for stage in record.stages if stage.start_s]
    intervals.sort(key=lambda each: each[1])

    def named(span: Span) -> Span:
        names = [name for name, start_s, wall_s in intervals if _common_s(span, start_s, wall_s) >= _WORTH_NAMING_S]
        return span.model_copy(update={"beside": ", ".join(names) or None})

    record.spans += [span for span in map(named, spans) if span.beside is not None]
    for stage in record.stages:
        stage.spans[:] = [named(span) if span.start_s < (stage.start_s or 0.0) else span for span in stage.spans]


def _common_s(span: Span, start_s: float, wall_s: float) -> float:
    return min(span.start_s + span.wall_s, start_s + wall_s) - max(span.start_s, start_s)
