"""Small real things for tests of stages: an engine whose memory is a fake device's, a context, a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from orchestrator.cache import Cache
from orchestrator.clock import Clock
from orchestrator.compose import compose
from orchestrator.config import Config
from orchestrator.device.fake import FakeDevice
from orchestrator.engine.base import CapturedGraph, Event, KVSpec, Media, Output, Request, WeightsReport
from orchestrator.errors import UnknownNameError
from orchestrator.events import Events, SilentEvents
from orchestrator.modality.base import DummyBatch, MediaInputs
from orchestrator.opening import open_device
from orchestrator.stage import Context
from orchestrator.state import State


class Lines(SilentEvents):
    """Keeps what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def info(self, message: str) -> None:
        self.said.append(message)

    def warning(self, message: str) -> None:
        self.said.append(f"warning: {message}")


@dataclass
class ToyEngine:
    """An engine that takes memory of a fake device and answers with token 1, at log-probability -1.

    The `planted` faults are what `verify` must catch: `lost`, `late`, `peak`, `wrong`, `short`, `error`, `held`.
    """

    device: FakeDevice
    weights: int = 100
    step_peak: int = 30
    encoder_peak: int = 20
    kv_spec: KVSpec = field(default_factory=lambda: KVSpec(1, 1, 1, "float32", 4))
    max_model_len: int = 64
    planted: str = ""
    block_size: int = 16
    num_blocks: int = 0
    graph_bytes: int = 0
    processor: Any = None
    model_config: Any = field(default_factory=lambda: SimpleNamespace(model_type="toy"))
    processor_identity: str = "toy"
    encoder_dtype: str = "float32"
    calls: list[str] = field(default_factory=list)
    closed: bool = False
    cached: int = 0

    def load(self, events: Events, admit: Callable[[int], None] | None = None) -> WeightsReport:
        if admit is not None:
            admit(self.weights)
        self.device.allocate(self.weights)
        return WeightsReport(self.weights, self.weights // 4, 1, "toy", "float32")

    def modalities(self) -> tuple[str, ...]:
        return ()

    def media_inputs(self, media: Media) -> MediaInputs:
        return MediaInputs(media.modality, [9] * 5, [True] * 5, {}, "hash")

    def prompt_tokens(self, request: Request) -> int:
        return 5

    def reserve_encoder_cache(self, tokens: int) -> int:
        self.device.allocate(tokens)
        return tokens

    def encode_dummy(self, batch: DummyBatch, items: dict[str, int]) -> None:
        self.cached += sum(items.values())
        self.device.use(self.encoder_peak)

    def set_micro_batch(self, items: Mapping[str, int], most_tokens: Mapping[str, int] | None = None) -> None:
        return None

    def divisible(self, item: MediaInputs) -> bool:
        return False

    def dummy_step(self, num_tokens: int, context: int) -> None:
        self.calls.append(f"step {num_tokens} after {context}")
        self.device.use(self.step_peak)

    def dummy_logits(self, num_rows: int) -> None:
        self.device.use(num_rows)

    def repeat_worst_step(self) -> None:
        self.device.use(max(self.step_peak, self.encoder_peak if self.cached else 0))

    def eager(self) -> AbstractContextManager[None]:
        return nullcontext()

    @property
    def most_blocks_used(self) -> int:
        return self.num_blocks

    def capture(self, sizes: Sequence[int]) -> list[CapturedGraph]:
        self.device.allocate(self.graph_bytes) if self.graph_bytes > 0 else self.device.free(-self.graph_bytes)
        return [CapturedGraph(size, 0.0, 0) for size in sizes]

    @property
    def keeps_graphs(self) -> bool:
        return False

    def kv_bytes(self, num_blocks: int) -> int:
        return (num_blocks + 1) * self.kv_spec.bytes_per_block(self.block_size)

    def allocate_kv(self, num_blocks: int) -> int:
        self.num_blocks = num_blocks
        size = self.kv_bytes(num_blocks)
        self.device.allocate(size)
        return size

    def generate(self, requests: Sequence[Request]) -> list[Output]:
        self.device.use(self.step_peak + (1 if self.planted == "peak" else 0))
        if self.planted == "late":
            self.device.allocate(1)
        outputs = [_answer(request) for request in requests]
        if self.planted == "wrong":
            outputs[-1].logprobs[-1] = -1.5
        if self.planted == "nan":
            outputs[0].logprobs[0] = float("nan")
        if self.planted == "short":
            outputs[0].token_ids.pop()
        if self.planted == "error":
            outputs[0].error = "too long"
        if self.planted == "held":
            self.cached = 1
        return outputs[1:] if self.planted == "lost" else outputs

    def stream(self, requests: Sequence[Request]) -> Iterator[Event]:
        for output in self.generate(requests):
            yield Event(output.request_id, tuple(output.token_ids), tuple(output.logprobs), output.text, "length")

    def cancel(self, request_id: str) -> None:
        return None

    def compile_kernels(self) -> None:
        return None

    def oracle_logprobs(self, request: Request, output: Output) -> tuple[list[float], list[float]]:
        best = 3.0 if self.planted == "likelier" else -1.0
        return [-1.0] * len(output.token_ids), [best] * len(output.token_ids)

    def clear_caches(self) -> None:
        self.cached = 1 if self.planted == "held" and self.cached else 0

    async def aclear_caches(self) -> None:
        self.clear_caches()

    def held(self) -> dict[str, int]:
        return {"encoder outputs": self.cached}

    def close(self) -> None:
        self.closed = True


def _answer(request: Request) -> Output:
    count = request.max_tokens
    return Output(request.request_id, [5], [1] * count, [-1.0] * count, "x", "length")


@cache
def composed(*overrides: str) -> Config:
    return compose(list(overrides)).config


def context(
    device: FakeDevice,
    folder: Path,
    *overrides: str,
    events: Events | None = None,
    names: dict[tuple[str, str], Any] | None = None,
) -> Context:
    """A context over a fake device; `names` is what `resolve` knows."""
    config = composed(*overrides)
    listener = events or SilentEvents()
    ledger = open_device(device, config, str(folder), listener).ledger
    return Context(
        config=config,
        device=device,
        cache=Cache(folder / "cache", max_bytes=1 << 20, warn=listener.warning),
        state=State(),
        ledger=ledger,
        events=listener,
        clock=Clock.from_now(),
        run_dir=folder,
        resolver=resolver(names or {}),
    )


def resolver(names: dict[tuple[str, str], Any]) -> Callable[[str, str], Any]:
    def resolve(group: str, name: str) -> Any:
        if (group, name) not in names:
            raise UnknownNameError(group, name, [known for of, known in names if of == group])
        return names[group, name]

    return resolve
