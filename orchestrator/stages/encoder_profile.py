"""What the encoder takes: each modality at its budget, the worst mix of them, and how many items a call may have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from orchestrator.engine.base import Engine
from orchestrator.memory.snapshot import Peak, peak_of
from orchestrator.modality.base import DummyBatch
from orchestrator.modality.budget import EncoderBudget
from orchestrator.out_of_memory import is_out_of_memory, let_go
from orchestrator.stage import Context

MIXED = "encoder.mixed"


@dataclass
class EncoderProfile:
    """What was measured.

    Attributes:
        parts: peaks of whole steps, by part: `encoder.image` and so on, `encoder.mixed`.
        items: items of each modality that such a step has.
        micro_batch: items of each modality that one call of the encoder takes.
        piece_tokens: encoder tokens of a call, for modalities whose costliest item is cut into several.
        trials: by modality, items in one call (as text, for the record; `1 in 4` is one item in four calls) -> the
            bytes that it took; None where the device refused them.
        trials_kept_bytes: what stayed of the trials, such as the libraries' workspaces.
    """

    parts: dict[str, Peak] = field(default_factory=dict)
    items: dict[str, dict[str, int]] = field(default_factory=dict)
    micro_batch: dict[str, int] = field(default_factory=dict)
    piece_tokens: dict[str, int] = field(default_factory=dict)
    trials: dict[str, dict[str, int | None]] = field(default_factory=dict)
    trials_kept_bytes: int = 0


def profile_encoder(
    ctx: Context, engine: Engine, dummy: DummyBatch, budget: EncoderBudget, beside_bytes: int
) -> EncoderProfile:
    """Encode the costliest items, as many as a step may have, each modality alone and then together.

    With `encoder.micro_batch=auto` the items of one call are chosen first: as many as stay within what is reserved
    anyway, which is the larger of `beside_bytes` (for the language model) and the largest single item, cut into pieces
    where it can be.
    """
    profile = EncoderProfile()
    most = _most_items(ctx, dummy, budget)
    given = ctx.config.encoder.micro_batch
    if given == "auto":
        profile.micro_batch = _Search(ctx, engine, dummy, profile).choose(most, beside_bytes)
    else:
        profile.micro_batch = dict.fromkeys(most, given)
    engine.set_micro_batch(profile.micro_batch, profile.piece_tokens)
    steps = {f"encoder.{modality}": {modality: count} for modality, count in most.items()}
    for part, items in steps.items():
        profile.parts[part] = _measured(ctx, engine, dummy, part, items)
    mix = worst_mix(
        tokens={modality: dummy.items[modality].num_embeds for modality in most},
        micro_batch=profile.micro_batch,
        most=most,
        peaks={modality: profile.parts[f"encoder.{modality}"].charged_bytes for modality in most},
        budget=min(budget.compute_budget, budget.cache_size),
    )
    if len(mix) > 1:
        steps[MIXED] = mix
        profile.parts[MIXED] = _measured(ctx, engine, dummy, MIXED, mix)
    profile.items = steps
    return profile


def worst_mix(
    *,
    tokens: Mapping[str, int],
    micro_batch: Mapping[str, int],
    most: Mapping[str, int],
    peaks: Mapping[str, int],
    budget: int,
) -> dict[str, int]:
    """Items of each modality in the step with the most memory that carries several: a whole encoder call of each, the
    costliest modality first, and then as many more in that order as the budget has room for.

    Calls run one after the other, so a call of each is what decides; a modality that has no room beside the costlier
    ones is not in such a step, and not in the result.

    Args:
        tokens: of one item, by modality.
        most: items that a step may have, by modality.
        peaks: bytes of a step with one modality alone.
        budget: tokens of a step.
    """
    items = dict.fromkeys(tokens, 0)
    costliest_first = sorted(tokens, key=lambda modality: -peaks[modality])
    for wanted in (dict.fromkeys(tokens, 1), micro_batch, most):
        for modality in costliest_first:
            room = budget // max(1, tokens[modality])
            more = min(wanted[modality], most[modality]) - items[modality]
            added = max(0, min(more, room))
            items[modality] += added
            budget -= added * tokens[modality]
    return {modality: count for modality, count in items.items() if count}


def _most_items(ctx: Context, dummy: DummyBatch, budget: EncoderBudget) -> dict[str, int]:
    """Items that a step may have, by modality: no more than the running requests may carry."""
    seqs = ctx.config.scheduler.max_num_seqs
    limits = ctx.config.mm.limit_per_prompt.model_dump() | dummy.per_prompt
    room = min(budget.compute_budget, budget.cache_size)
    # The item with the most bytes may have fewer tokens than the one with the most of them, so that more fit.
    fit = {modality: room // max(1, item.num_embeds) for modality, item in dummy.items.items()}
    return {modality: max(1, min(count, seqs * limits.get(modality, 1))) for modality, count in fit.items()}


def _measured(ctx: Context, engine: Engine, dummy: DummyBatch, part: str, items: dict[str, int]) -> Peak:
    with ctx.span(part), peak_of(ctx.device) as peak:
        engine.encode_dummy(dummy, items)
    return peak


class _Search:
    """How many items one call takes: doubled as long as the call stays within what is reserved anyway."""

    def __init__(self, ctx: Context, engine: Engine, dummy: DummyBatch, profile: EncoderProfile) -> None:
        self._ctx, self._engine, self._dummy, self._profile = ctx, engine, dummy, profile

    def choose(self, most: Mapping[str, int], beside_bytes: int) -> dict[str, int]:
        single = {modality: self._one(modality, beside_bytes) for modality in most}
        limit = max(beside_bytes, *single.values()) if single else 0
        return {modality: self._grown(modality, most[modality], limit) for modality in most}

    def _one(self, modality: str, beside_bytes: int) -> int:
        """Bytes of one item, cut in halves as long as that keeps it from passing what is reserved anyway. That the
        device has no room for one uncut is the stage's failure."""
        item = self._dummy.items[modality]
        taken, tokens, calls = self._taken(modality, 1), item.num_embeds, 1
        while taken > beside_bytes and tokens > 1 and self._engine.divisible(item):
            tokens, calls, before = -(-tokens // 2), calls * 2, taken
            self._profile.piece_tokens[modality] = tokens
            taken = self._taken(modality, 1, f"1 in {calls}")
            if taken >= before:
                break
        return taken

    def _grown(self, modality: str, most: int, limit: int) -> int:
        """The last number of items that stayed within the limit."""
        chosen, before, taken = 1, 0, self._profile.trials[modality]["1"] or 0
        if modality in self._profile.piece_tokens:
            return chosen
        while chosen < most and self._next(before, taken) <= limit:
            count = min(2 * chosen, most)
            with self._refusals(modality, count):
                before, taken = taken, self._taken(modality, count)
            if self._profile.trials[modality][str(count)] is None or taken > limit:
                break
            chosen = count
        return chosen

    def _next(self, before: int, taken: int) -> int:
        """The least that twice the items can be expected to take; a call that must fail is not worth its memory."""
        return taken + 1 if not before else taken + (taken - before)

    def _taken(self, modality: str, count: int, name: str | None = None) -> int:
        name = name or str(count)
        self._engine.set_micro_batch({modality: count}, self._profile.piece_tokens)
        peak = _measured(self._ctx, self._engine, self._dummy, f"try {name} {modality}", {modality: count})
        self._profile.trials_kept_bytes += peak.kept_bytes
        taken = peak.charged_bytes
        self._profile.trials.setdefault(modality, {})[name] = taken
        return taken

    @contextmanager
    def _refusals(self, modality: str, count: int) -> Iterator[None]:
        """A larger call that the device has no room for only ends the search."""
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            let_go(error)
            self._ctx.device.empty_cache()
            self._profile.trials[modality][str(count)] = None
