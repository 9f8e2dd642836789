"""A table over cards and shares: what fits, how much KV cache it leaves, and what sets the peak."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.plan.described import positions
from orchestrator.plan.footprint import Fit, Footprint
from orchestrator.plan.planner import Planner
from orchestrator.report.layout import Row, Table, render
from orchestrator.units import GiB, MiB


@dataclass(frozen=True)
class Line:
    """One card at one share.

    Attributes:
        longest: tokens of the longest sequence that the KV cache holds and the model has positions for.
        bound_bytes: how far the KV cache may be from a start's.
    """

    card: str
    footprint: Footprint
    fit: Fit
    longest: int
    bound_bytes: int


def lines(planner: Planner, cards: Sequence[str], utils: Sequence[float]) -> Iterator[Line]:
    """Card after card; without `utils`, each at the share that the overrides give.

    Raises:
        UserError: the configuration cannot work on any card.
    """
    most = positions(planner.config(cards[0]), planner.registry) if cards else None
    for card in cards:
        planned = planner.planned(card)
        for util in utils or (planned.util,):
            fit = planned.footprint.at(util)
            longest = fit.tokens if most is None else min(fit.tokens, most)
            yield Line(card, planned.footprint, fit, longest, planned.bound_bytes)


def table(found: Sequence[Line]) -> str:
    """The lines for a person, and under them what a plan left out."""
    header = (
        *("card", "util", "fits", "blocks", "tokens", "KV GiB", "+-", "concurrency", "longest"),
        *("held GiB", "peak GiB", "set by"),
    )
    text = render(Table(header, tuple(map(_row, found))))
    left_out = sorted({name for line in found for name in line.footprint.left_out})
    assumed = sorted({name for line in found for name in line.footprint.assumed})
    notes = [f"taken at its worst: {', '.join(assumed)}"] if assumed else []
    notes += [f"not planned, and in no figure: {', '.join(left_out)}"] if left_out else []
    return "\n".join([text, *notes])


def as_json(line: Line) -> Mapping[str, Any]:
    fit, footprint = line.fit, line.footprint
    return {
        "card": line.card,
        "util": fit.util,
        "fits": fit.fits,
        "num_gpu_blocks": fit.blocks,
        "num_tokens": fit.tokens,
        "kv_cache_bytes": fit.bytes,
        "bound_bytes": line.bound_bytes,
        "max_concurrency": fit.max_concurrency,
        "max_model_len": line.longest,
        "limited_by": fit.limited_by,
        "accounts": dict(footprint.accounts),
        "peak_activation_bytes": footprint.peak_bytes,
        "peaks_bytes": dict(footprint.peaks),
        "set_by": footprint.set_by,
        "refusal": fit.refusal,
        "suggestions": dict(fit.suggestions),
        "left_out": list(footprint.left_out),
        "assumed": list(footprint.assumed),
    }


def _row(line: Line) -> Row:
    fit, footprint = line.fit, line.footprint
    numbers = (f"{fit.blocks:,}", f"{fit.tokens:,}", _gib(fit.bytes), _bound(line.bound_bytes))
    more = (*numbers, f"{fit.max_concurrency:.1f}", f"{line.longest:,}") if fit.fits else ("-",) * 6
    cells = (f"{fit.util:g}", "yes" if fit.fits else "no", *more)
    held = (_gib(footprint.held_bytes), _gib(footprint.peak_bytes), footprint.set_by)
    return Row(line.card, (*cells, *held), _note(fit))


def _note(fit: Fit) -> str:
    if fit.fits:
        return "" if fit.limited_by == "util" else f"limited by {fit.limited_by}"
    return fit.advice


def _gib(size: int) -> str:
    return f"{size / GiB:.2f}"


def _bound(size: int) -> str:
    return f"{size / GiB:.2f}" if size >= GiB else f"{size / MiB:.0f} MiB"
