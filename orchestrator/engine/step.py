"""What a step is made of: requests on their way, chunks of their tokens, and the media items they carry."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from orchestrator.engine.sampling import Draw, Sampling
from orchestrator.engine.text import TextStream
from orchestrator.modality.base import MediaInputs


@dataclass(frozen=True)
class PlacedItem:
    """A media item in a prompt.

    Attributes:
        positions: where its encoder outputs go, in their order.
        runs: spans (start, stop) of positions that look at each other both ways, so that one step must hold each whole;
            none where the model's attention is causal throughout.
    """

    inputs: MediaInputs
    positions: tuple[int, ...]
    runs: tuple[tuple[int, int], ...] = ()

    @property
    def first(self) -> int:
        return self.positions[0]

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.positions[-1] + 1


@dataclass(frozen=True)
class Axes:
    """Positions on several axes (M-RoPE): a prompt's, by axis. Later tokens count on from the last of them, as in
    `generate`; the models' own deltas count from the highest, which is another one behind a video that lasts longer
    than it is high and wide."""

    prompt: tuple[tuple[int, ...], ...]

    def span(self, axis: int, start: int, stop: int) -> list[int]:
        """Positions of the tokens `start` to `stop` (exclusive) on an axis."""
        known = self.prompt[axis]
        shift = known[-1] + 1 - len(known)
        later = range(max(start, len(known)) + shift, max(stop, len(known)) + shift)
        return [*known[start:stop], *later]

    def at(self, axis: int, position: int) -> int:
        """Of one token."""
        known = self.prompt[axis]
        return known[position] if position < len(known) else known[-1] + 1 - len(known) + position


@dataclass(eq=False)
class OpenRequest:
    """A request on its way: its tokens, how many of them are in the KV cache, and what it holds.

    Attributes:
        stop_ids: tokens that end it.
        axes: its positions, for a model that wants them on several axes.
        computed: tokens whose keys and values are in the cache.
        locked: hashes of the items it keeps in the encoder cache, by their place in `items`.
        sampling: how its tokens are drawn; None for the likeliest.
        text: its text as it grows; None where nobody needs it before the end.
        told: how many of its tokens its listener has.
    """

    prompt: list[int]
    max_tokens: int
    items: tuple[PlacedItem, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    axes: Axes | None = None
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    locked: dict[int, str] = field(default_factory=dict)
    finish_reason: str = ""
    error: str | None = None
    request_id: str = ""
    sampling: Sampling | None = None
    text: TextStream | None = None
    told: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def decodes(self) -> bool:
        """Whether the prompt is done and one token is next."""
        return bool(self.output)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Ids of the positions `start` to `stop` (exclusive)."""
        split = len(self.prompt)
        return self.prompt[start:stop] + self.output[max(0, start - split) : max(0, stop - split)]

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Spans of its prompt that look at each other both ways."""
        return tuple(run for item in self.items for run in item.runs)

    def fail(self, error: str) -> None:
        self.finish_reason, self.error = "error", error
        self.items = ()

    def forget(self, index: int) -> None:
        """Let go of the tensors of an item that no step will need again."""
        placed = self.items[index]
        spent = replace(placed, inputs=replace(placed.inputs, tensors={}))
        self.items = (*self.items[:index], spent, *self.items[index + 1 :])


@dataclass(frozen=True)
class Chunk:
    """New tokens of one sequence in a step: positions `start` to `stop` (exclusive)."""

    sequence: OpenRequest
    start: int
    stop: int

    @property
    def samples(self) -> bool:
        """Whether its last token is the sequence's last known one, so that the next is drawn after it."""
        return self.stop == self.sequence.num_tokens

    @property
    def decode(self) -> bool:
        return self.start >= len(self.sequence.prompt)


@dataclass(frozen=True)
class Step:
    """What runs together: items to encode first, then chunks of tokens."""

    chunks: tuple[Chunk, ...]
    encode: tuple[MediaInputs, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(chunk.stop - chunk.start for chunk in self.chunks)

    @property
    def draws(self) -> list[Draw | None]:
        """How the token of each chunk that samples is drawn, in order; None for the likeliest."""
        sequences = (chunk.sequence for chunk in self.chunks if chunk.samples)
        return [each.sampling.draw(len(each.output)) if each.sampling else None for each in sequences]


@dataclass(frozen=True)
class StepRecord:
    """A step in numbers, for tests and statistics."""

    num_decodes: int
    num_prefills: int
    num_tokens: int
    num_encoded: int

    @classmethod
    def of(cls, step: Step) -> StepRecord:
        decodes = sum(chunk.decode for chunk in step.chunks)
        return cls(decodes, len(step.chunks) - decodes, step.num_tokens, len(step.encode))
