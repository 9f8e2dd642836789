"""The artifacts that the built-in stages exchange."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.beside import Moment
from orchestrator.engine.base import CapturedGraph, Engine
from orchestrator.modality.base import DummyBatch
from orchestrator.modality.budget import EncoderBudget
from orchestrator.state import Key

if TYPE_CHECKING:
    from orchestrator.stage import Context


@dataclass(frozen=True)
class Profile:
    """Peaks above what stays, in bytes, by part of a step; `item_shapes` of the costliest items, by modality, and
    `micro_batch` and `piece_tokens`, which one call of the encoder takes (see `Engine.set_micro_batch`)."""

    peaks: dict[str, int]
    encoder_budget: EncoderBudget
    item_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    micro_batch: dict[str, int] = field(default_factory=dict)
    piece_tokens: dict[str, int] = field(default_factory=dict)

    @property
    def peak_activation(self) -> int:
        return max(self.peaks.values(), default=0)

    @property
    def set_by(self) -> str:
        """The part with the highest peak."""
        return max(self.peaks, key=lambda part: self.peaks[part]) if self.peaks else "nothing"


@dataclass(frozen=True)
class Graphs:
    """Captured decode graphs."""

    captured: list[CapturedGraph] = field(default_factory=list)


@dataclass(frozen=True)
class KVAllocation:
    """The KV cache as it was made; `num_blocks` without the padding block."""

    num_blocks: int
    block_size: int
    bytes_per_block: int
    bytes: int
    limited_by: str


ENGINE: Key[Engine] = Key("engine", Engine)  # type: ignore[type-abstract]
DUMMY: Key[DummyBatch] = Key("dummy", DummyBatch)
PROFILE: Key[Profile] = Key("profile", Profile)
GRAPHS: Key[Graphs] = Key("graphs", Graphs)
KV_CACHE: Key[KVAllocation] = Key("kv_cache", KVAllocation)
VERIFIED: Key[bool] = Key("verified", bool)
REHEARSED: Key[bool] = Key("rehearsed", bool)
"""The worst step ran in this start with everything loaded, as serving will find it."""

MODEL_KNOWN: Moment[tuple[Context, Engine]] = Moment("model known")
"""The engine knows its model and turns media into its inputs; the weights are read next. With the context of the stage
that reads them."""
