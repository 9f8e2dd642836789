"""The engine of a plan: transformers' models and this project's engine as they are, on shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.config import Config
from orchestrator.device.plan import PlanDevice
from orchestrator.engine.base import CapturedGraph, Event, Output, Request, WeightsReport
from orchestrator.engine.planning.attention import BACKENDS
from orchestrator.engine.planning.loader import ShapesLoader
from orchestrator.engine.planning.media import outline
from orchestrator.engine.planning.repeats import Repeats
from orchestrator.engine.planning.shapes import Shapes
from orchestrator.engine.planning.tape import Tape
from orchestrator.engine.transformers import TransformersEngine
from orchestrator.errors import ConfigError, StageError
from orchestrator.events import Events
from orchestrator.modality.base import DummyBatch, ItemSpec, MediaInputs

_LOADER = "shapes"


class PlannedEngine(TransformersEngine):
    """Says what a start would take; serves nothing."""

    def __init__(
        self,
        config: Config,
        device: PlanDevice,
        resolve: Callable[[str, str], Any],
        cache_dir: Path | None,
        *,
        repeats: bool = True,
    ) -> None:
        """
        Args:
            repeats: whether layers that are alike are run once a step; without, a plan comes to the same, slowly.

        Raises:
            ConfigError: the attention backend is of a plugin, whose memory is not known.
        """
        self._tape = Tape(device)
        self._shapes = Shapes(self._tape)
        self._repeats = Repeats(self._tape, self._shapes)
        self._runs_each = not repeats
        attention = config.engine.attention
        if attention == "auto":
            attention = device.spec.attention if device.spec.attention != "triton" else "auto"
        if attention not in (*BACKENDS, "auto"):
            names = ", ".join(BACKENDS)
            raise ConfigError.of("engine.attention", f"a plan knows what {names} take, and no other", attention)
        super().__init__(_planned(config, attention), device, partial(self._resolved, resolve), cache_dir)

    def _resolved(self, resolve: Callable[[str, str], Any], group: str, name: str) -> Any:
        if group == "loaders" and name == _LOADER:
            return partial(ShapesLoader, self._shapes)
        if group == "attention":
            return BACKENDS[name]
        return resolve(group, name)

    def load(self, events: Events, admit: Callable[[int], None] | None = None) -> WeightsReport:
        report = super().load(events, admit)
        if not self._runs_each:
            self._repeats.stand_in(self._need().model)
        return report

    @contextmanager
    def _step(self) -> Iterator[None]:
        with self._repeats.one_step(), self._shapes.running():
            yield

    def reserve_encoder_cache(self, tokens: int) -> int:
        with self._shapes.running():
            return super().reserve_encoder_cache(tokens)

    def encode_dummy(self, batch: DummyBatch, items: dict[str, int]) -> None:
        with self._step():
            super().encode_dummy(batch, items)

    def outlined(self, spec: ItemSpec) -> MediaInputs | None:
        return outline(self._prompts, spec, self.encoder_dtype)

    def compile_kernels(self) -> None:
        with self._step(), self._shapes.inventing():
            super().compile_kernels()

    def dummy_step(self, num_tokens: int, context: int) -> None:
        with self._step():
            super().dummy_step(num_tokens, context)

    def dummy_logits(self, num_rows: int) -> None:
        with self._step(), self._shapes.inventing():
            super().dummy_logits(num_rows)

    def repeat_worst_step(self) -> None:
        # What the encoder would ask for was known when it ran the first time.
        with self._step(), self._shapes.inventing():
            super().repeat_worst_step()

    def capture(self, sizes: Sequence[int]) -> list[CapturedGraph]:
        with self._step():
            return super().capture(sizes)

    def generate(self, requests: Sequence[Request]) -> list[Output]:
        raise StageError("a plan serves no requests")

    def stream(self, requests: Sequence[Request]) -> Iterator[Event]:
        raise StageError("a plan serves no requests")

    def kv_bytes(self, num_blocks: int) -> int:
        with self._shapes.running():
            return super().kv_bytes(num_blocks)

    def allocate_kv(self, num_blocks: int) -> int:
        with self._shapes.running():
            return super().allocate_kv(num_blocks)


def _planned(config: Config, attention: str) -> Config:
    engine = config.engine.model_copy(update={"attention": attention})
    weights = config.weights.model_copy(update={"loader": _LOADER})
    return config.model_copy(update={"engine": engine, "weights": weights})
