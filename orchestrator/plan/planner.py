"""Plans that remember: one profile a setting and kind of card, however many shares and cards are asked about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator.compose.folders import ConfigFolders
from orchestrator.config import Config, GpuSpec
from orchestrator.errors import UserError
from orchestrator.plan.cards import alike, composed_for, for_card, known_cards
from orchestrator.plan.footprint import Footprint, footprint_of
from orchestrator.planned import card_of
from orchestrator.records import RunRecord
from orchestrator.registry import Registry

Plan = Callable[[list[str]], RunRecord]
"""A planned start: overrides in, its record out, also that of one that does not fit."""

_AMPLE, _AMPLE_FOR_A_SIZE = "1TiB", "1024TiB"
"""Of a card on which anything fits: what a start takes does not depend on what is there for it. The greater one holds
whatever `kv.bytes` asks for; a KV cache that takes what is left would have billions of blocks there."""


@dataclass(frozen=True)
class Planned:
    """A footprint, and how far it may be from a start's, in bytes."""

    footprint: Footprint
    card: GpuSpec
    util: float

    @property
    def bound_bytes(self) -> int:
        return round(self.card.bound_fraction * self.card.total_bytes)


class Planner:
    """Plans of one set of overrides on any card, with more overrides after them.

    Args:
        overrides: none of them chooses a card or a device.
    """

    def __init__(self, overrides: Sequence[str], registry: Registry, plan: Plan) -> None:
        self.overrides, self.registry, self._plan = list(overrides), registry, plan
        self._known: dict[tuple[GpuSpec, tuple[str, ...]], tuple[Footprint, GpuSpec]] = {}
        self._configs: dict[tuple[str, ...], Config] = {}
        self.cards = known_cards(ConfigFolders.find(registry))
        self.plans_made = 0

    def config(self, card: str, *more: str) -> Config:
        """
        Raises:
            UserError: the configuration cannot work.
        """
        key = (card, *more)
        if key not in self._configs:
            self._configs[key] = composed_for(card, [*self.overrides, *more], self.registry)
        return self._configs[key]

    def planned(self, card: str, *more: str) -> Planned:
        """What a start takes on a card.

        Raises:
            UserError: the configuration cannot work, whatever the card has.
        """
        config = self.config(card, *more)
        spec = card_of(config)
        key = (alike(spec), more)
        if key not in self._known:
            ample = _AMPLE if config.kv.bytes == "auto" else _AMPLE_FOR_A_SIZE
            self._known[key] = (footprint_of(self._ample(card, more, ample), config), spec)
        footprint, planned_for = self._known[key]
        total = spec.total_bytes if config.gpu.total_bytes is None else int(config.gpu.total_bytes)
        return Planned(footprint.on(spec, total, planned_for), spec, config.gpu.util)

    def record(self, card: str, *more: str) -> RunRecord | None:
        """A whole plan on the card itself, which checks what was worked out from a footprint; None where memory does
        not suffice.

        Raises:
            UserError: it fails for another reason.
        """
        self.plans_made += 1
        record = self._plan(for_card(card, [*self.overrides, *more]))
        if record.status != "ok" and not _is_memory(record):
            raise UserError(_why(record))
        return record if record.status == "ok" else None

    def _ample(self, card: str, more: Sequence[str], total: str) -> RunRecord:
        self.plans_made += 1
        record = self._plan(for_card(card, [*self.overrides, *more, f"gpu.total_bytes={total}", "gpu.util=0.99"]))
        if record.status != "ok":
            raise UserError(_why(record))
        if record.kv_cache is None:
            raise UserError("the pipeline allocates no KV cache, so nothing can be said of it; pipeline=default does")
        return record


def _is_memory(record: RunRecord) -> bool:
    return record.error is not None and record.error.type in ("BudgetError", "DeviceOutOfMemoryError")


def _why(record: RunRecord) -> str:
    return record.error.message if record.error is not None else "the plan did not end"
