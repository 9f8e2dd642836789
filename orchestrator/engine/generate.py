"""Who runs when: the scheduler, which makes steps of requests. Knows no tensors.

A step first carries one token of every sequence that decodes, then chunks of prompts, oldest first, as far as
`max_num_batched_tokens` goes. A sequence is admitted only when the pool has the blocks of its whole prompt and all it
may generate, so none is ever preempted and none waits for blocks while it holds some. An encoder output stays from the
chunk that first needs it until its last token is in the KV cache; a chunk that would need one more than there is room
for ends just before it, so that those who hold room always go on and give it back. Same requests, same steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.engine.encoder_cache import EncoderIndex
from orchestrator.engine.kv_cache import BlockPool, blocks_for
from orchestrator.engine.step import Chunk, OpenRequest, Step, StepRecord
from orchestrator.modality.base import MediaInputs


@dataclass(frozen=True)
class Limits:
    """What bounds a step and a sequence; all in tokens but `max_num_seqs`.

    Attributes:
        most_item_tokens: by modality, encoder tokens of the largest item that memory was reserved for; a modality that
            was not profiled is not in it.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    encoder_compute_budget: int
    most_item_tokens: Mapping[str, int] = field(default_factory=dict)


class Scheduler:
    """First come, first served, over one block pool and one encoder cache."""

    def __init__(self, limits: Limits, block_size: int, pool: BlockPool, encoder: EncoderIndex) -> None:
        self._limits, self._block_size = limits, block_size
        self._pool, self._encoder = pool, encoder
        self._waiting: deque[OpenRequest] = deque()
        self._running: list[OpenRequest] = []
        self.records: list[StepRecord] = []

    @property
    def num_open(self) -> int:
        """Sequences that are not finished."""
        return len(self._waiting) + len(self._running)

    @property
    def waiting(self) -> Sequence[OpenRequest]:
        """Sequences that are not admitted yet, in their order."""
        return self._waiting

    def add(self, sequence: OpenRequest) -> None:
        """Queue a sequence; one that can never be served is finished with its error at once."""
        error = self._never(sequence)
        if error is not None:
            sequence.fail(error)
        else:
            self._waiting.append(sequence)

    def _never(self, sequence: OpenRequest) -> str | None:
        """Why a sequence cannot be served however long it waits."""
        limits, prompt = self._limits, len(sequence.prompt)
        if not prompt:
            return "the prompt has no tokens"
        if sequence.max_tokens < 1:
            return f"max_tokens is {sequence.max_tokens}: it must be at least 1"
        longest = prompt + sequence.max_tokens
        if longest > limits.max_model_len:
            return (
                f"the prompt has {prompt} tokens and max_tokens is {sequence.max_tokens}: {longest} in all, "
                f"and max_model_len is {limits.max_model_len}"
            )
        needed = blocks_for(longest, self._block_size)
        if needed > self._pool.num_blocks:
            return f"{longest} tokens take {needed} blocks of the KV cache, which has {self._pool.num_blocks}"
        for start, stop in sequence.runs:
            if stop - start > limits.max_num_batched_tokens:
                return (
                    f"{stop - start} tokens of one item look at each other and need one step, and "
                    f"max_num_batched_tokens is {limits.max_num_batched_tokens}"
                )
        for item in sequence.items:
            rows, modality = item.inputs.num_embeds, item.inputs.modality
            if rows > self._encoder.capacity:
                return f"one {modality} has {rows} encoder tokens, and the encoder cache holds {self._encoder.capacity}"
            if rows > limits.encoder_compute_budget:
                return f"one {modality} has {rows} encoder tokens, and a step encodes {limits.encoder_compute_budget}"
            most = limits.most_item_tokens.get(modality, rows)
            if rows > most:
                return f"one {modality} has {rows} encoder tokens, and memory was reserved for {most} at most"
        return None

    def schedule(self) -> Step:
        """The next step. Not empty while a sequence is open."""
        plan = _Plan(self._limits.max_num_batched_tokens, self._limits.encoder_compute_budget)
        for sequence in self._running:
            if sequence.decodes and plan.tokens_left:
                # Its items and runs lie behind it.
                plan.add(Chunk(sequence, sequence.computed, sequence.computed + 1))
        for sequence in self._running:
            if not sequence.decodes:
                self._continue(sequence, plan)
        while self._waiting and plan.tokens_left and self._admit(self._waiting[0]):
            sequence = self._waiting.popleft()
            self._running.append(sequence)
            self._continue(sequence, plan)
        return Step(tuple(plan.chunks), tuple(plan.encode))

    def _admit(self, sequence: OpenRequest) -> bool:
        """Give a sequence all the blocks it can ever need, if there are so many."""
        needed = blocks_for(len(sequence.prompt) + sequence.max_tokens, self._block_size)
        if len(self._running) >= self._limits.max_num_seqs or needed > self._pool.num_free:
            return False
        sequence.blocks = self._pool.allocate(needed)
        return True

    def _continue(self, sequence: OpenRequest, plan: _Plan) -> None:
        """Put as many of a sequence's next tokens into the step as there is room for."""
        start = sequence.computed
        stop = _before_run(sequence, start, min(sequence.num_tokens, start + plan.tokens_left))
        stop = _before_run(sequence, start, self._lock_items(sequence, start, stop, plan))
        if stop > start:
            plan.add(Chunk(sequence, start, stop))

    def _lock_items(self, sequence: OpenRequest, start: int, stop: int, plan: _Plan) -> int:
        """Keep the items that positions `start` to `stop` need, encoding those that are not there; where the chunk must
        end instead, if one of them has no room in this step."""
        for index, item in enumerate(sequence.items):
            if index in sequence.locked or item.stop <= start:
                continue
            if item.first >= stop:
                break
            key, rows = item.inputs.content_hash, item.inputs.num_embeds
            if key not in self._encoder:
                if rows > plan.encoder_left or not self._encoder.can_add(rows):
                    return max(start, item.first)
                self._encoder.add(key, rows)
                plan.encode.append(item.inputs)
                plan.encoder_left -= rows
            self._encoder.acquire(key)
            sequence.locked[index] = key
        return stop

    def complete(self, step: Step, sampled: Sequence[tuple[int, float]]) -> list[OpenRequest]:
        """Note that a step has run. `sampled` has a token and its log-probability for each chunk that samples, in
        order. Returns the sequences that it finished."""
        self.records.append(StepRecord.of(step))
        drawn = iter(sampled)
        samples = [chunk.samples for chunk in step.chunks]
        for chunk, last in zip(step.chunks, samples, strict=True):
            chunk.sequence.computed = chunk.stop
            self._let_go(chunk.sequence)
            if last:
                _append(chunk.sequence, *next(drawn))
        finished = [chunk.sequence for chunk in step.chunks if chunk.sequence.finish_reason]
        for sequence in finished:
            self._drop(sequence)
        return finished

    def _let_go(self, sequence: OpenRequest, *, all_items: bool = False) -> None:
        """Release the items whose last token is in the KV cache."""
        for index, key in list(sequence.locked.items()):
            if all_items or sequence.items[index].stop <= sequence.computed:
                self._encoder.release(key)
                del sequence.locked[index]
                sequence.forget(index)

    def _drop(self, sequence: OpenRequest) -> None:
        self._running.remove(sequence)
        self._pool.free(sequence.blocks)
        sequence.blocks = []
        self._let_go(sequence, all_items=True)

    def cancel(self, is_cancelled: Callable[[OpenRequest], bool]) -> list[OpenRequest]:
        """End the open sequences of which that is true, between two steps; which they were."""
        waiting = [sequence for sequence in self._waiting if is_cancelled(sequence)]
        for sequence in waiting:
            self._waiting.remove(sequence)
        running = [sequence for sequence in self._running if is_cancelled(sequence)]
        for sequence in running:
            self._drop(sequence)
        for sequence in (*waiting, *running):
            sequence.finish_reason, sequence.items = "cancelled", ()
        return [*waiting, *running]

    def abort(self) -> None:
        """Give back what every open sequence holds; none of them is finished."""
        self._waiting.clear()
        for sequence in list(self._running):
            self._drop(sequence)


@dataclass
class _Plan:
    """A step while it is made."""

    tokens_left: int
    encoder_left: int
    chunks: list[Chunk] = field(default_factory=list)
    encode: list[MediaInputs] = field(default_factory=list)

    def add(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.tokens_left -= chunk.stop - chunk.start


def _before_run(sequence: OpenRequest, start: int, stop: int) -> int:
    """Where a chunk that would end at `stop` ends instead, so that it cuts no run of tokens that look both ways."""
    return next((max(start, run[0]) for run in sequence.runs if run[0] < stop < run[1]), stop)


def _append(sequence: OpenRequest, token: int, logprob: float) -> None:
    sequence.output.append(token)
    sequence.logprobs.append(logprob)
    if (sequence.text is not None and sequence.text.push(token)) or token in sequence.stop_ids:
        sequence.finish_reason = "stop"
    elif len(sequence.output) == sequence.max_tokens:
        sequence.finish_reason = "length"


def run_all(scheduler: Scheduler, refill: Callable[[], None] = lambda: None) -> Iterator[Step]:
    """The steps until every sequence is finished; `complete` must be called for each before the next is asked for.

    Args:
        refill: adds the sequences that are still to come; called before each step.

    Raises:
        RuntimeError: a step is empty while sequences are open, which would never end.
    """
    while True:
        refill()
        if not scheduler.num_open:
            return
        step = scheduler.schedule()
        if not step.chunks:
            raise RuntimeError(f"{scheduler.num_open} requests are open and none of them can run")
        yield step
