"""The largest value of a setting that fits a card, and the smallest share that does."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import floor

from orchestrator.compose import read_all
from orchestrator.errors import UserError
from orchestrator.plan.bracket import Bracket
from orchestrator.plan.described import positions
from orchestrator.plan.footprint import Footprint
from orchestrator.plan.planner import Planned, Planner
from orchestrator.units import format_size

FIELDS = {
    "max_model_len": "scheduler.max_model_len",
    "images": "mm.limit_per_prompt.image",
    "max_num_seqs": "scheduler.max_num_seqs",
    "gpu.util": "gpu.util",
}
"""What can be asked for, and the setting that it is."""

_UTIL_STEPS = 100


@dataclass(frozen=True)
class Solution:
    """A value that fits where the next one does not.

    Attributes:
        setting: what was asked for, as a key of the configuration.
        binds: what the next value runs into.
        checks: values, and whether a whole plan with each came to what `does` says.
        command: what starts it.
        plans: planned starts that the answer took.
    """

    setting: str
    value: str
    binds: str
    command: str
    checks: dict[str, bool] = field(default_factory=dict)
    plans: int = 0
    does: str = "starts"


class Solver:
    """Searches on one card, at the share that the overrides give."""

    def __init__(self, planner: Planner, card: str) -> None:
        self._planner, self._card = planner, card

    def solve(self, what: str) -> Solution:
        """
        Args:
            what: a key of `FIELDS`.

        Raises:
            UserError: no value fits, or the configuration cannot work.
        """
        searches = {
            "gpu.util": self._util,
            "max_model_len": self._max_model_len,
            "max_num_seqs": self._max_num_seqs,
            "images": self._images,
        }
        return searches[what]()

    def _util(self) -> Solution:
        footprint = self._planned().footprint
        if footprint.wanted_blocks is not None:
            raise UserError("with a size in kv.bytes no gpu.util is consulted; kv.bytes=auto takes what a share leaves")
        fitting = [step for step in range(1, _UTIL_STEPS + 1) if footprint.at(step / _UTIL_STEPS).fits]
        # A share under which the KV cache fits may be too small for the profile, whose peaks come before it.
        step = next((step for step in fitting if self._starts("gpu.util", f"{step / _UTIL_STEPS:.2f}")), None)
        if step is None:
            most = floor(footprint.free_bytes / footprint.total_bytes * _UTIL_STEPS) / _UTIL_STEPS
            needs, advice = _needs_of(replace(self._planned(), util=most)), footprint.at(most).advice
            raise UserError(f"no gpu.util fits on gpu={self._card}: {needs}; with gpu.util={most:g} {advice}")
        value, before = f"{step / _UTIL_STEPS:.2f}", f"{(step - 1) / _UTIL_STEPS:.2f}"
        checks = {value: True}
        if step > 1:
            checks[before] = self._starts("gpu.util", before)
        return self._solution("gpu.util", value, f"the next smaller share: {_needs(footprint)}", checks)

    def _max_model_len(self) -> Solution:
        name, block = FIELDS["max_model_len"], self._planner.config(self._card).kv.block_size
        most, binds = self._greatest_length()
        if most is not None and self._fits_length(most):
            return self._solution(name, str(most), binds, self._checked(name, (most,)))

        def fits(blocks: int) -> tuple[bool, int]:
            planned = self._planned(f"{name}={blocks * block}")
            footprint = planned.footprint
            return footprint.at(planned.util).fits, footprint.most_blocks(planned.util) // (footprint.most_seqs or 1)

        value = block * self._search(fits, None if most is None else (most - 1) // block)
        if not value:
            raise self._none_fits(name, self._planned(f"{name}={block}"))
        checks = self._checked(name, (value, value + 1))
        return self._solution(name, str(value), self._memory(f"{name}={value}"), checks)

    def _greatest_length(self) -> tuple[int | None, str]:
        """Tokens of a sequence beyond which every card is refused, if there is such a number, and why."""
        config = self._planner.config(self._card)
        most, block = positions(config, self._planner.registry), config.kv.block_size
        if config.kv.bytes not in ("auto", "need"):
            held = block * (self._planned(f"{FIELDS['max_model_len']}={block}").footprint.wanted_blocks or 0)
            if most is None or held < most:
                return held, f"kv.bytes={config.kv.bytes} holds {held:,} tokens"
        return most, "" if most is None else f"the model has positions for {most:,} tokens"

    def _fits_length(self, length: int) -> bool:
        planned = self._planned(f"{FIELDS['max_model_len']}={length}")
        return planned.footprint.at(planned.util).fits

    def _max_num_seqs(self) -> Solution:
        name = FIELDS["max_num_seqs"]

        def fits(count: int) -> tuple[bool, int]:
            planned = self._planned(f"{name}={count}")
            held = planned.footprint.most_blocks(planned.util) // planned.footprint.blocks_for(1)
            return held >= count, held

        value = self._search(fits, None)
        if not value:
            raise self._none_fits(name, self._planned(f"{name}=1"))
        checks = {str(count): self._holds(name, count) for count in (value, value + 1)}
        longest = self._planned().footprint.max_model_len
        binds = f"sequences of {longest:,} tokens at once; {self._memory(f'{name}={value}')}"
        return self._solution(name, str(value), binds, checks, does="holds so many at once")

    def _images(self) -> Solution:
        name = FIELDS["images"]
        footprint = self._planned(f"{name}=1").footprint
        tokens = footprint.media_tokens.get("image")
        if tokens is None:
            raise UserError("this model takes no images, so there is no number of them to find")
        # A prompt has at least one token of text or answer beside them.
        room = (footprint.max_model_len - 1) // tokens
        if not room:
            longest = f"scheduler.max_model_len={footprint.max_model_len}"
            raise UserError(f"{longest} holds no image, the costliest is {tokens:,} tokens; give {tokens + 1} or more")

        def fits(count: int) -> tuple[bool, int]:
            planned = self._planned(f"{name}={count}")
            return planned.footprint.at(planned.util).fits, room

        value = self._search(fits, room)
        if not value:
            raise self._none_fits(name, self._planned(f"{name}=1"))
        if value < room:
            checks = self._checked(name, (value, value + 1))
            return self._solution(name, str(value), self._memory(f"{name}={value}"), checks)
        binds = f"one more would be {(value + 1) * tokens:,} tokens: {tokens:,} each, and a sequence has "
        return self._solution(name, str(value), f"{binds}{footprint.max_model_len:,}", self._checked(name, (value,)))

    def _search(self, fits: Callable[[int], tuple[bool, int]], most: int | None) -> int:
        """The largest number up to `most` that fits; 0 if none does.

        Args:
            fits: whether a number fits, and the largest that would if what a start takes did not depend on it.
        """
        bracket = Bracket(0, None if most is None else most + 1)
        guess = most or 1
        while bracket.open:
            bracket.tried(guess, *fits(guess))
            guess = bracket.guess()
        return bracket.low

    def _planned(self, *more: str) -> Planned:
        return self._planner.planned(self._card, *more)

    def _checked(self, name: str, values: Sequence[int]) -> dict[str, bool]:
        return {str(value): self._starts(name, str(value)) for value in values}

    def _starts(self, name: str, value: str) -> bool:
        return self._planner.record(self._card, f"{name}={value}") is not None

    def _holds(self, name: str, count: int) -> bool:
        """Whether a planned start holds so many of the longest sequences at once."""
        record = self._planner.record(self._card, f"{name}={count}")
        return record is not None and record.kv_cache is not None and record.kv_cache.max_concurrency >= count

    def _memory(self, *more: str) -> str:
        return f"memory: {_needs_of(self._planned(*more))}"

    def _none_fits(self, name: str, least: Planned) -> UserError:
        """Of a search without an answer, as an error to raise; `least` is the smallest value's."""
        at, advice = f"gpu={self._card} at gpu.util={least.util:g}", least.footprint.at(least.util).advice
        return UserError(f"no {name} fits on {at}: {_needs_of(least)}; {advice}")

    def _solution(self, name: str, value: str, binds: str, checks: dict[str, bool], does: str = "starts") -> Solution:
        command = command_with(self._planner.overrides, name, value)
        return Solution(name, value, binds, command, checks, self._planner.plans_made, does)


def _needs_of(planned: Planned) -> str:
    return f"{_needs(planned.footprint)}, of {format_size(planned.footprint.ceiling_bytes(planned.util))}"


def _needs(footprint: Footprint) -> str:
    one = footprint.kv_bytes(footprint.blocks_for(1))
    held, peak = format_size(footprint.held_bytes), format_size(footprint.peak_bytes)
    length = f"{footprint.max_model_len:,} tokens"
    return f"{held} held, a peak of {peak} set by {footprint.set_by}, {format_size(one)} for a sequence of {length}"


def command_with(overrides: Sequence[str], name: str, value: str) -> str:
    """The command line of a start with these overrides, of which `name` is given `value`."""
    kept = [text for text, given in zip(overrides, read_all(overrides), strict=True) if given.key != name]
    return shlex.join(["python", "-m", "orchestrator", *kept, f"{name}={value}"])


def as_text(solution: Solution, card: str) -> str:
    lines = [f"{solution.setting}={solution.value} on gpu={card}", f"binds    {solution.binds}"]
    lines += [f"checked  {value}: {solution.does if ok else 'does not'}" for value, ok in solution.checks.items()]
    return "\n".join([*lines, f"start    {solution.command}"])
