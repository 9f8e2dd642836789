"""What a start learned, as a value and as an entry of the disk cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from orchestrator.artifacts import Profile
from orchestrator.cache import Entry
from orchestrator.memory.snapshot import Peak
from orchestrator.modality.budget import EncoderBudget

SCHEMA = 1
"""Of what is stored; a change of its meaning makes every older plan a miss."""

Bytes = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]


class _Value(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Part(_Value):
    """The peak of a part of a step (see `Peak`) in bytes, and the media that go into it."""

    above: Bytes
    reserved: Bytes
    kept: Bytes
    inputs: Bytes = 0

    @classmethod
    def of(cls, peak: Peak, inputs: int = 0) -> Part:
        return cls(above=peak.above_bytes, reserved=peak.reserved_bytes, kept=peak.kept_bytes, inputs=inputs)

    @property
    def live(self) -> int:
        """Live tensors at the worst moment that are gone afterwards."""
        return max(0, self.above - self.kept)

    @property
    def charged(self) -> int:
        """See `Peak.charged_bytes`."""
        return max(0, self.reserved - self.kept)


class Measured(_Value):
    """What a profile finds out, by part of a step and by modality.

    Attributes:
        items: items of each modality in a step, by part of the encoder.
        most_tokens: encoder tokens of the item with the most of them.
        shapes: of the costliest item, as its profiler names it.
        micro_batch: items of one call of the encoder.
        piece_tokens: encoder tokens of a call, where an item is cut.
        trials: see `EncoderProfile`.
        trials_kept: bytes that stayed of the trials, and of compiling kernels.
    """

    parts: dict[str, Part]
    items: dict[str, dict[str, Count]]
    most_tokens: dict[str, Bytes]
    shapes: dict[str, list[int]]
    micro_batch: dict[str, Count]
    piece_tokens: dict[str, Count]
    trials: dict[str, dict[str, Bytes | None]]
    trials_kept: Bytes

    @property
    def in_order(self) -> list[tuple[str, Part]]:
        """The parts as records list them, whichever way they were kept: the encoder's last."""
        return sorted(self.parts.items(), key=lambda item: (item[0].startswith("encoder."), item[0]))

    @property
    def kept_bytes(self) -> int:
        return self.trials_kept + sum(part.kept for part in self.parts.values())

    @property
    def refused(self) -> bool:
        """Whether a lack of memory ended a search: another start may have more, or less."""
        return any(taken is None for trials in self.trials.values() for taken in trials.values())

    def profile(self, budget: EncoderBudget) -> Profile:
        return Profile(
            peaks={name: part.charged for name, part in self.in_order},
            encoder_budget=budget,
            item_shapes={modality: tuple(shape) for modality, shape in self.shapes.items()},
            micro_batch=dict(self.micro_batch),
            piece_tokens=dict(self.piece_tokens),
        )


class Graph(_Value):
    """A captured batch size and the bytes of this process that it took."""

    size: Count
    bytes: Bytes


class Facts(_Value):
    """What was measured, by whom and when.

    Attributes:
        run_id: of the start that learned it.
        learned_at: seconds since 1970.
        graphs: as captured, the largest first; none where there are none.
        graph_bytes: of all graphs, as they were charged.
        kernels: the attention backend that was chosen.
        digests: of the parts of the fingerprint, to say later what has changed.
    """

    run_id: str
    learned_at: float
    measured: Measured
    graphs: list[Graph]
    graph_bytes: Bytes
    kernels: str
    digests: dict[str, str]


@dataclass(frozen=True)
class Learned:
    """A plan: what was measured, and the step that shows whether it still holds, as `RemembersSteps.remembered_step`
    gives it."""

    facts: Facts
    step: Entry

    def entry(self, about: dict[str, Any]) -> Entry:
        """
        Args:
            about: for a person who looks at the cache.
        """
        return Entry(self.step.tensors, {"about": about, "step": self.step.meta, "facts": self.facts.model_dump()})

    @classmethod
    def of(cls, entry: Entry) -> Learned:
        """
        Raises:
            ValueError: the entry is not a plan.
        """
        facts, step = entry.meta.get("facts"), entry.meta.get("step")
        if not isinstance(step, dict):
            raise ValueError("it holds no step")
        try:
            return cls(Facts.model_validate(facts), Entry(entry.tensors, step))
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
