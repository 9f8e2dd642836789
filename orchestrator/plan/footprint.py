"""What a start takes of a card, whatever share it asks for, and what follows for each share. Pure: a record in, bytes
out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrator.config import Config, GpuSpec
from orchestrator.errors import BudgetError
from orchestrator.memory.allocator import LARGE_PAGE
from orchestrator.memory.budget import blocks_needed, refuse_if_not_free
from orchestrator.memory.fit import Room, refuse_if_no_request_fits
from orchestrator.memory.ledger import HELD
from orchestrator.records import RunRecord
from orchestrator.units import MiB, format_size

_PAGE = 2 * MiB
"""Memory that is mapped into reserved addresses comes in such pages."""


@dataclass(frozen=True)
class Fit:
    """What a start comes to at one share of a card.

    Attributes:
        blocks: usable blocks of the KV cache; 0 where the start is refused.
        bytes: of these blocks and the padding block.
        limited_by: `util`, `free`, `need` or `kv.bytes`.
        refusal: why the start is refused; empty where it is not.
        suggestions: field -> a value that, given alone, would work.
    """

    util: float
    blocks: int
    block_size: int
    bytes: int
    max_model_len: int
    limited_by: str
    refusal: str = ""
    suggestions: Mapping[str, str] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        return not self.refusal

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_size

    @property
    def max_concurrency(self) -> float:
        """Sequences of the greatest length that the KV cache holds at once."""
        return self.tokens / self.max_model_len

    @property
    def advice(self) -> str:
        """What would make a start fit that is refused."""
        works = " or ".join(f"{name}={value}" for name, value in self.suggestions.items())
        return f"{works} would work" if works else "no setting of the budget makes it fit"


@dataclass(frozen=True)
class Footprint:
    """What a start takes of a card.

    Attributes:
        driver_bytes: what nobody's process holds and is not free.
        accounts: what is held when the KV cache is sized, by account; `residual` and `padding` among them.
        peak_bytes: what a step takes above that, at its worst.
        peaks: the same by part, each as the profile run found it.
        wanted_blocks: usable blocks that `kv.bytes` asks for; None for what is left.
        most_seqs: sequences that `wanted_blocks` were asked for, where they follow from the limits.
        media_tokens: of the costliest item, by modality.
        left_out: what the plan has in no figure.
        assumed: what it could not know and took at its worst.
    """

    total_bytes: int
    driver_bytes: int
    accounts: Mapping[str, int]
    peak_bytes: int
    peaks: Mapping[str, int]
    bytes_per_block: int
    block_size: int
    page_bytes: int
    max_model_len: int
    max_num_seqs: int
    wanted_blocks: int | None = None
    most_seqs: int | None = None
    media_tokens: Mapping[str, int] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    @property
    def free_bytes(self) -> int:
        """What an idle card has for one start."""
        return self.total_bytes - self.driver_bytes

    @property
    def held_bytes(self) -> int:
        return sum(self.accounts.values())

    @property
    def set_by(self) -> str:
        """The part that sets the peak."""
        return max(self.peaks, key=lambda part: self.peaks[part]) if self.peaks else "nothing"

    def on(self, card: GpuSpec, total_bytes: int, planned_for: GpuSpec) -> Footprint:
        """The same start on another card with the same kernels and allocator: only the card's constants change."""
        changed = {
            **self.accounts,
            "context": self.accounts["context"] - planned_for.context_bytes + card.context_bytes,
            "non_torch": self.accounts["non_torch"] - planned_for.library_bytes + card.library_bytes,
        }
        return replace(self, total_bytes=total_bytes, driver_bytes=card.driver_bytes, accounts=changed)

    def kv_bytes(self, blocks: int) -> int:
        """What so many usable blocks take, the padding block included."""
        return -(-(blocks + 1) * self.bytes_per_block // self.page_bytes) * self.page_bytes

    def at(self, util: float) -> Fit:
        """What a start comes to that asks for `util` of the card."""
        room = self._room(util)
        blocks = room.most_blocks if self.wanted_blocks is None else self.wanted_blocks
        try:
            if self.wanted_blocks is None:
                refuse_if_not_free(total_bytes=self.total_bytes, util=util, free_bytes=self.free_bytes)
            held = f"{format_size(self.held_bytes)} held and a peak of {format_size(self.peak_bytes)}"
            refuse_if_no_request_fits(room, f"{held} set by {self.set_by}")
        except BudgetError as error:
            return self._fit(util, 0, str(error).partition("; ")[0], error.suggestions)
        return self._fit(util, blocks)

    def blocks_for(self, sequences: int) -> int:
        """Usable blocks that hold so many sequences of the greatest length."""
        return blocks_needed(num_seqs=sequences, max_model_len=self.max_model_len, block_size=self.block_size)

    def ceiling_bytes(self, util: float) -> int:
        """What a start may hold; a size in `kv.bytes` knows no share."""
        return self._room(util).ceiling_bytes

    def most_blocks(self, util: float) -> int:
        """Usable blocks that there is room for, and no more than a size in `kv.bytes` holds."""
        most = self._room(util).most_blocks
        is_sized = self.wanted_blocks is not None and self.most_seqs is None
        return min(self.wanted_blocks or 0, most) if is_sized else most

    def _fit(self, util: float, blocks: int, refusal: str = "", works: Mapping[str, str] | None = None) -> Fit:
        return Fit(
            util=util,
            blocks=blocks,
            block_size=self.block_size,
            bytes=self.kv_bytes(blocks) if blocks else 0,
            max_model_len=self.max_model_len,
            limited_by=self._limited_by(util),
            refusal=refusal,
            suggestions=works or {},
        )

    def _limited_by(self, util: float) -> str:
        if self.wanted_blocks is not None:
            return "need" if self.most_seqs is not None else "kv.bytes"
        return "free" if self.free_bytes < util * self.total_bytes else "util"

    def _room(self, util: float) -> Room:
        return Room(
            total_bytes=self.total_bytes,
            free_bytes=self.free_bytes,
            util=util,
            charged_bytes=self.held_bytes + self.peak_bytes,
            block_size=self.block_size,
            bytes_per_block=self.bytes_per_block,
            max_model_len=self.max_model_len,
            size_of=self.kv_bytes,
            blocks=self.wanted_blocks,
            most_seqs=self.most_seqs,
        )


def footprint_of(record: RunRecord, config: Config) -> Footprint:
    """The footprint that a planned start shows.

    Raises:
        ValueError: a record without a ledger or a KV cache.
    """
    ledger, kv = record.ledger, record.kv_cache
    if ledger is None or kv is None:
        raise ValueError(f"{record.run_id}: the record of a start that has no KV cache")
    longest = round(kv.num_tokens / kv.max_concurrency)
    profile = _metrics(record, "profile_run")
    accounts = {name: ledger.accounts[name] for name in HELD if name != "kv_cache"}
    # Graphs are captured over the padding block's page, which is held by then and in the cache's own size too.
    captured = bool(_metrics(record, "graph_capture").get("graphs")) and config.graphs.mode == "keep"
    padding = -(-kv.bytes_per_block // _PAGE) * _PAGE if captured else 0
    return Footprint(
        total_bytes=ledger.total_bytes,
        driver_bytes=ledger.other_processes_bytes,
        accounts={**accounts, "residual": max(0, ledger.residual_bytes), "padding": padding},
        peak_bytes=ledger.accounts["peak_activation"],
        peaks=profile.get("peaks_bytes", {}),
        bytes_per_block=kv.bytes_per_block,
        block_size=kv.block_size,
        page_bytes=_PAGE if config.graphs.mode == "keep" else LARGE_PAGE,
        max_model_len=longest,
        max_num_seqs=config.scheduler.max_num_seqs,
        wanted_blocks=None if config.kv.bytes == "auto" else kv.num_gpu_blocks,
        most_seqs=config.scheduler.max_num_seqs if config.kv.bytes == "need" else None,
        media_tokens={
            modality: facts["tokens"]
            for modality, facts in _metrics(record, "dummy_data").get("modalities", {}).items()
        },
        left_out=tuple((record.plan or {}).get("left_out", ())),
        assumed=tuple((record.plan or {}).get("assumed", ())),
    )


def _metrics(record: RunRecord, use: str) -> dict[str, Any]:
    return next((stage.metrics for stage in record.stages if stage.use == use), {})
