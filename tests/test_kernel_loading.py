from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.cache import Entry
from orchestrator.device.base import WorksAside
from orchestrator.device.cpu import CpuDevice
from orchestrator.engine.attention.reference import ReferenceAttention
from orchestrator.engine.shortened import shortened
from orchestrator.engine.transformers import TransformersEngine
from orchestrator.engine.warming import KnownStep, LoadsKernels
from orchestrator.engine.weights.safetensors import SafetensorsLoader
from orchestrator.events import SilentEvents
from orchestrator.modality.base import DummyBatch
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

    def attend(self, *args: object) -> torch.Tensor:
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


def loaded_beside(engine: TransformersEngine, known: Callable[[], KnownStep | None] = lambda: None) -> list[str | None]:
    """Load the engine, and its kernels in a thread meanwhile; what that returned."""
    said: list[str | None] = []
    threads: list[threading.Thread] = []

    def admit(_: int) -> None:
        threads.append(threading.Thread(target=lambda: said.append(engine.load_kernels([4, 2, 1], known))))
        threads[0].start()

    engine.load(SilentEvents(), admit)
    threads[0].join(60)
    return said


def served(engine: TransformersEngine) -> list[list[int]]:
    engine.reserve_encoder_cache(256)
    engine.allocate_kv(64)
    return [output.token_ids for output in engine.generate(ASKED)]


def learned(folder: Path) -> KnownStep:
    """Of an engine that encoded an image."""
    engine = make_engine(folder)
    item = engine.media_inputs(ASKED[0].media[0])
    engine.encode_dummy(DummyBatch({"image": item}), {"image": 2})
    engine.dummy_step(8, 0)
    step = engine.remembered_step()
    engine.close()
    return KnownStep(step, {"image": 2}, {}, 1)


def test_each_kind_of_layer_is_there_once_over_the_same_weights(folder: Path) -> None:
    engine = make_engine(folder)
    model = engine._need().model
    before = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    short = shortened(model)
    assert len(short.get_decoder().layers) == 1 < len(model.get_decoder().layers)
    assert {parameter.data_ptr() for parameter in short.parameters()} < set(before.values())
    rotary = short.get_decoder().rotary_emb
    rotary.register_buffer("inv_freq", torch.full_like(rotary.inv_freq, 7.0), persistent=False)
    short.get_decoder().layers[0].self_attn.q_proj.weight = torch.nn.Parameter(torch.zeros(1))
    assert not bool((model.get_decoder().rotary_emb.inv_freq == 7.0).any())
    assert {name: tensor.data_ptr() for name, tensor in model.named_parameters()} == before
    engine.close()


def test_kernels_load_while_weights_do_and_change_no_answer(folder: Path) -> None:
    plain = make_engine(folder, load=False)
    plain.load(SilentEvents())
    device = Aside()
    engine = on(device, folder)
    assert isinstance(device, WorksAside) and isinstance(engine, LoadsKernels)
    asked: list[bool] = []
    known = learned(folder)

    def ask() -> KnownStep:
        asked.append(True)
        return known

    assert loaded_beside(engine, ask) == [None]
    assert asked == [True]
    assert served(engine) == served(plain)
    engine.close()
    plain.close()


@pytest.mark.parametrize("peak_bytes", [1, 1 << 40])
def test_an_encoder_that_takes_much_is_given_less(folder: Path, peak_bytes: int) -> None:
    step = learned(folder).step
    engine = on(Aside(), folder)
    assert loaded_beside(engine, lambda: KnownStep(step, {"image": 2}, {"image": 8}, peak_bytes)) == [None]
    engine.close()


def test_what_fails_is_told_and_stops_nothing(folder: Path) -> None:
    spoilt = on(Aside(), folder)
    (why,) = loaded_beside(spoilt, lambda: KnownStep(Entry({}, {}), {}, {}, 1))
    assert why is not None and why.startswith("KeyError")
    assert len(served(spoilt)) == 2
    spoilt.close()
    broken = on(Aside(), folder, Broken)
    assert loaded_beside(broken) == ["no such kernel"]
    broken.close()


def test_nothing_is_done_where_no_thread_can_work_aside_or_no_weights_load(folder: Path) -> None:
    engine = TransformersEngine(make_config(folder), CpuDevice(), resolve, None)
    assert engine.load_kernels([1], lambda: None) is None
    assert loaded_beside(engine) == [None]
    assert engine.load_kernels([1], lambda: None) is None
    engine.close()
