from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestrator.device.base import WorksAside
from orchestrator.device.cpu import CpuDevice
from orchestrator.engine.attention.reference import ReferenceAttention
from orchestrator.engine.transformers import TransformersEngine
from orchestrator.engine.warming import LoadsKernels
from orchestrator.engine.weights.safetensors import SafetensorsLoader
from orchestrator.events import SilentEvents
from tests.tiny_models import PLACEHOLDER, image, internvl_folder, make_config, make_engine, request, resolve

ASKED = [
    request(f"{PLACEHOLDER} what is this?", image(1), chat=False, max_tokens=6),
    request("a text without media", chat=False, max_tokens=5),
]


class Aside(CpuDevice):
    """A CPU on which a thread may work beside the others, as on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()

    @contextmanager
    def aside(self) -> Iterator[None]:
        self.entered.set()
        yield


class Slow(SafetensorsLoader):
    """Weights are not read before somebody works aside."""

    device: Aside

    def load(self, *args: Any, **options: Any) -> int:
        files = super().load(*args, **options)
        assert self.device.entered.wait(60)
        return files


class Broken(ReferenceAttention):
    devices = frozenset({"cpu"})

    def warm_up(self, *args: object) -> None:
        raise RuntimeError("no such kernel\nand more")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return internvl_folder(tmp_path_factory.mktemp("internvl"))


def on(device: Aside, folder: Path, attention: Any = ReferenceAttention) -> TransformersEngine:
    def found(group: str, name: str) -> Any:
        if group == "attention":
            return attention
        loader = Slow()
        loader.device = device
        return lambda: loader

    return TransformersEngine(make_config(folder), device, found, None)


def loaded_beside(engine: TransformersEngine) -> list[str | None]:
    """Load the engine, and its kernels in a thread meanwhile; what that returned."""
    said: list[str | None] = []
    threads: list[threading.Thread] = []

    def admit(_: int) -> None:
        threads.append(threading.Thread(target=lambda: said.append(engine.load_kernels())))
        threads[0].start()

    engine.load(SilentEvents(), admit)
    threads[0].join(60)
    return said


def served(engine: TransformersEngine) -> list[list[int]]:
    engine.reserve_encoder_cache(256)
    engine.allocate_kv(64)
    return [output.token_ids for output in engine.generate(ASKED)]


def test_kernels_load_while_weights_do_and_change_no_answer(folder: Path) -> None:
    plain = make_engine(folder, load=False)
    plain.load(SilentEvents())
    device = Aside()
    engine = on(device, folder)
    assert isinstance(device, WorksAside) and isinstance(engine, LoadsKernels)
    assert loaded_beside(engine) == [None]
    assert served(engine) == served(plain)
    engine.close()
    plain.close()


def test_what_fails_is_told_and_stops_nothing(folder: Path) -> None:
    broken = on(Aside(), folder, Broken)
    assert loaded_beside(broken) == ["no such kernel"]
    broken.close()


def test_nothing_is_done_where_no_thread_can_work_aside_or_no_weights_load(folder: Path) -> None:
    engine = TransformersEngine(make_config(folder), CpuDevice(), resolve, None)
    assert engine.load_kernels() is None
    assert loaded_beside(engine) == [None]
    assert engine.load_kernels() is None
    engine.close()
