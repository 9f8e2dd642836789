"""Stages, attention backends and engines with a fault each, named on the command line as `tests.planted:Name`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from orchestrator import Context, Key, Output, Request, Stage, StageConfig, StageError
from orchestrator.config import Config
from orchestrator.engine.attention.base import AttentionMetadata
from orchestrator.engine.attention.reference import ReferenceAttention
from orchestrator.engine.transformers import TransformersEngine
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


class Needy(Stage[StageConfig]):
    requires = (NOTHING,)

    def run(self, ctx: Context) -> None:
        return None


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
