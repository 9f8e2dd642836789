"""Stages, attention backends and engines with a fault each, named on the command line as `tests.planted:Name`."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from orchestrator import Context, ItemSpec, Key, Output, Request, Stage, StageConfig, StageError
from orchestrator.config import Config
from orchestrator.engine.attention.base import AttentionMetadata
from orchestrator.engine.attention.reference import ReferenceAttention
from orchestrator.engine.base import WeightsReport
from orchestrator.engine.transformers import TransformersEngine
from orchestrator.events import Events
from orchestrator.modality.generic import GenericProfiler
from orchestrator.units import MiB

NOTHING: Key[int] = Key("nothing", int)


class Note(Stage[StageConfig]):
    """Nothing is wrong with this one."""

    def run(self, ctx: Context) -> str:
        ctx.metrics["noted"] = True
        return "noted"


class Break(Stage[StageConfig]):
    def run(self, ctx: Context) -> None:
        raise StageError("the third wheel came off")


class Crash(Stage[StageConfig]):
    def run(self, ctx: Context) -> None:
        raise ZeroDivisionError("nobody raised this on purpose")


class Sleep(Stage[StageConfig]):
    """Leaves a file when it begins, and sleeps longer than any test waits."""

    def run(self, ctx: Context) -> None:
        Path("asleep").touch()
        time.sleep(600)


class ImportsMore(Stage[StageConfig]):
    """A module that nothing else needs, of a package that is there."""

    def run(self, ctx: Context) -> None:
        import json.tool  # noqa: F401


class Surroundings(Stage[StageConfig]):
    """Tells what a process is given by the one that starts it."""

    def run(self, ctx: Context) -> None:
        ctx.metrics["folder"] = os.getcwd()  # noqa: PTH109 - not resolved
        names = ("CUDA_VISIBLE_DEVICES", "MINE", "OPENBLAS_NUM_THREADS")
        ctx.metrics["environment"] = {name: os.environ.get(name) for name in names}
        ctx.metrics["typed"] = sys.stdin.readline().strip()
        ctx.metrics["cores"] = len(os.sched_getaffinity(0))


class Segfault(Stage[StageConfig]):
    def run(self, ctx: Context) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class LateCtrlC(Stage[StageConfig]):
    """Ctrl-C once the start is over, while libraries clean up."""

    def run(self, ctx: Context) -> None:
        atexit.register(signal.raise_signal, signal.SIGINT)


class WritesPastPython(Stage[StageConfig]):
    """Writes as a library in C would what an import server would take for a message; and stays a moment."""

    def run(self, ctx: Context) -> None:
        with suppress(OSError):
            os.write(1, b"\0\0\0\1x")
        time.sleep(0.5)


class Meet(Stage[StageConfig]):
    """Ends when another start, with another value of MINE, has come to this stage in the same folder."""

    def run(self, ctx: Context) -> None:
        mine = int(os.environ["MINE"])
        Path(f"met{mine}").touch()
        while not Path(f"met{1 - mine}").exists():
            time.sleep(0.01)


class Needy(Stage[StageConfig]):
    requires = (NOTHING,)

    def run(self, ctx: Context) -> None:
        return None


class BrokenProfiler(GenericProfiler):
    def costliest(self, modality: str) -> ItemSpec:
        raise StageError("the tape measure broke")


class SlowProfiler(GenericProfiler):
    """Leaves a file when it is asked, and answers after longer than any test waits."""

    def costliest(self, modality: str) -> ItemSpec:
        Path("asleep").touch()
        for _ in range(60_000):
            time.sleep(0.01)
        return super().costliest(modality)


class NoWeights(TransformersEngine):
    """Its weights are lost once all else is known of the model."""

    def load(self, events: Events, admit: Callable[[int], None] | None = None) -> WeightsReport:
        super().load(events, admit)
        raise StageError("the weights fell off the bus")


class NoImports(TransformersEngine):
    """For pipelines that never make their engine."""

    @staticmethod
    def imports(config: Config) -> tuple[str, ...]:
        return ()


class GarbageBlock(ReferenceAttention):
    """Once all four requests decode, and so their prompts are in the cache, the first block is overwritten."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        if query.shape[0] == 4:
            k_cache[1], v_cache[1] = 9.0, 9.0
        return super().attend(query, key, value, k_cache, v_cache, meta, scale)


class SlotOffByOne(ReferenceAttention):
    """What was just written moves on by a slot."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        block_size = k_cache.shape[1]
        slots = meta.slot_mapping
        wrong = (slots + 1).clamp(max=k_cache.shape[0] * block_size - 1)
        for cache in (k_cache, v_cache):
            written = cache[slots // block_size, slots % block_size]
            cache[slots // block_size, slots % block_size] = 0.0
            cache[wrong // block_size, wrong % block_size] = written
        return super().attend(query, key, value, k_cache, v_cache, meta, scale)


class LostRequest(TransformersEngine):
    def generate(self, requests: Sequence[Request]) -> list[Output]:
        return super().generate(requests[:-1])


class LateMemory(TransformersEngine):
    """Keeps memory that the first requests took."""

    late: torch.Tensor

    def generate(self, requests: Sequence[Request]) -> list[Output]:
        self.late = torch.ones(160 * MiB, dtype=torch.uint8)
        return super().generate(requests)


class GreedyPeak(TransformersEngine):
    """Takes more than the profile saw, and gives it back."""

    def generate(self, requests: Sequence[Request]) -> list[Output]:
        torch.ones(400 * MiB, dtype=torch.uint8)
        return super().generate(requests)


class Hungry(TransformersEngine):
    """Its step wants more memory than any machine has."""

    def dummy_step(self, num_tokens: int, context: int) -> None:
        kept = torch.ones(256 * MiB, dtype=torch.uint8)
        torch.empty(kept.numel() << 30, dtype=torch.uint8)
