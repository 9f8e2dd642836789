"""What stages ask of an engine, and what goes in and comes out of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from orchestrator.beside import Beside
from orchestrator.events import Events
from orchestrator.memory.budget import kv_bytes_per_token
from orchestrator.modality.base import DummyBatch, ItemSpec, MediaInputs


@dataclass(frozen=True)
class Media:
    """One item of a prompt.

    `data` of an image is a PIL image. Of a video it is a list of PIL images of one size, or a uint8 array (frames,
    height, width, 3); frames are taken to be sampled already, at the rate at which the model's processor would. Of
    audio it is one channel of floating-point samples at the rate of the processor's feature extractor, or such samples
    and their rate in a tuple, which is refused where the rate is another.
    """

    modality: str
    data: Any


@dataclass(frozen=True)
class Request:
    """A prompt. With `chat` the model's chat template is put around it, media first; without, `text` is taken as it is
    and must hold a placeholder for each item.

    Attributes:
        request_id: what events, outputs and `cancel` name it by; `cancel` ends all requests that share one.
        ignore_eos: whether the model's own end of text does not end it; `stop` and `stop_token_ids` still do.
        temperature: what logits are divided by before a token is drawn; 0 takes the likeliest token.
        top_p: draw among as few of the likeliest tokens as together have this probability.
        seed: with the prompt it decides what is drawn, whatever else runs; requests that shall differ need another.
        stop: strings that end the text just before them. `token_ids` keeps the tokens up to the one that completed it.
        stop_token_ids: tokens that end it, each kept as its last one.
    """

    request_id: str
    text: str
    media: tuple[Media, ...] = ()
    max_tokens: int = 16
    ignore_eos: bool = False
    chat: bool = True
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass
class Output:
    """What became of a request. `logprobs` are natural logarithms of the chosen tokens' probabilities, as the model has
    them: before temperature and `top_p`.

    `finish_reason`: `stop`, `length`, `cancelled` or `error`; then `error` says what was wrong with this request alone.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    text: str = ""
    finish_reason: str = ""
    error: str | None = None


@dataclass(frozen=True)
class Event:
    """News of a request: tokens, log-probabilities and text since its last one. Text may come later than its tokens.

    `finish_reason` is empty until its last event; see `Output`.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: str = ""
    error: str | None = None


@dataclass(frozen=True)
class KVSpec:
    """The shape of one token in the KV cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    dtype_bytes: int

    def bytes_per_block(self, block_size: int) -> int:
        return block_size * kv_bytes_per_token(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype_bytes=self.dtype_bytes,
        )


@dataclass(frozen=True)
class WeightsReport:
    """What was loaded: bytes on the device, parameters, and how it came there; `seconds` from an empty model to a
    filled one."""

    bytes: int
    parameters: int
    files: int
    loader: str
    dtype: str
    seconds: float = 0.0


@dataclass(frozen=True)
class CapturedGraph:
    size: int
    seconds: float
    bytes: int


@runtime_checkable
class Engine(Protocol):
    """A model on a device. Methods are called in the order of the pipeline; none is called twice unless it says so.

    What a name of `orchestrator.engines` stands for is called with the configuration, the device, `resolve` (plugin
    group and name -> what that means) and the cache's folder or None; its static `imports(config)` names the modules
    that are imported before.
    """

    kv_spec: KVSpec
    max_model_len: int
    """Tokens of the longest sequence, resolved against the model."""
    model_config: Any
    """The model's transformers configuration."""
    processor_identity: str
    """A fingerprint of the files that decide what the processor makes of a prompt."""
    encoder_dtype: str
    """The element type in which the encoder takes pixels and spectrograms, such as bfloat16."""

    @property
    def processor(self) -> Any:
        """The model's Hugging Face processor; the tokenizer for a model without media."""

    def load(self, events: Events, admit: Callable[[int], None] | None = None) -> WeightsReport:
        """Read the checkpoint and put the weights on the device.

        Args:
            admit: called with the bytes that the weights will take, once `kv_spec` and `max_model_len` are known and
                before the first of them is read; what it raises ends the loading. From then on `processor`,
                `modalities`, `media_inputs` and `prompt_tokens` may be used, also from other threads.
        """

    def modalities(self) -> tuple[str, ...]:
        """What this model can take, whatever the limits say."""

    def media_inputs(self, media: Media) -> MediaInputs:
        """One item through the model's processor, on the host. May be called at any time."""

    def prompt_tokens(self, request: Request) -> int:
        """Tokens that a request's prompt becomes, media included. May be called at any time."""

    def reserve_encoder_cache(self, tokens: int) -> int:
        """Take the memory that keeps encoder outputs; its bytes."""

    def encode_dummy(self, batch: DummyBatch, items: dict[str, int]) -> None:
        """Encode so many copies of each item in one step and keep the outputs as the encoder cache keeps them. May be
        called again, as long as no request is open."""

    def set_micro_batch(self, items: Mapping[str, int], most_tokens: Mapping[str, int] | None = None) -> None:
        """How much one call of the encoder takes from now on. May be called again.

        Args:
            items: by modality; at first it is `encoder.micro_batch`, and 1 for `auto`.
            most_tokens: by modality, the encoder tokens of a call, for items that are `divisible`: one with more goes
                through in several calls. A modality that is not in it is not cut.
        """

    def divisible(self, item: MediaInputs) -> bool:
        """Whether an item's parts, such as tiles or frames, can go through the encoder one after the other."""

    def compile_kernels(self) -> None:
        """Make ready what is compiled on first use, so that no later call waits for it. May be called again."""

    def dummy_step(self, num_tokens: int, context: int) -> None:
        """The language model on `num_tokens` new tokens after `context` tokens in the cache, in sequences of at most
        `max_model_len`, on a cache of which only the padding block exists. Leaves nothing."""

    def dummy_logits(self, num_rows: int) -> None:
        """Logits and sampling for `num_rows` sequences. Leaves nothing."""

    @property
    def keeps_graphs(self) -> bool:
        """Whether graphs that are captured before the KV cache has memory stay right afterwards. Otherwise they only
        show what graphs take, and must be captured again."""

    def repeat_worst_step(self) -> None:
        """Run again what the dummy calls ran last, on inputs that are made on the device. Leaves nothing; may be called
        whenever no request is open."""

    def capture(self, sizes: Sequence[int]) -> list[CapturedGraph]:
        """Capture one decode graph a batch size, in place of earlier ones; none where steps cannot be captured. May be
        called again."""

    def kv_bytes(self, num_blocks: int) -> int:
        """What `allocate_kv` takes for `num_blocks` usable blocks of `kv.block_size` tokens and the padding block."""

    def allocate_kv(self, num_blocks: int) -> int:
        """Make the KV cache of `num_blocks` usable blocks and the padding block; its bytes."""

    def generate(self, requests: Sequence[Request]) -> list[Output]:
        """Serve requests together, each to its end; outputs in the order of the requests. May be called again."""

    def stream(self, requests: Sequence[Request]) -> Iterator[Event]:
        """As `generate`, with news as it comes; nothing runs but while the next event is waited for. To close the
        iterator ends what is still open. Nothing else is served meanwhile."""

    def cancel(self, request_id: str) -> None:
        """End a request that is being served, before its next step. May be called from any thread; a request that is
        not being served is left alone."""

    def eager(self) -> AbstractContextManager[None]:
        """While it is entered, steps run as they are launched, also where graphs were captured."""

    @property
    def most_blocks_used(self) -> int:
        """The highest number of blocks that requests have held at once."""

    def oracle_logprobs(self, request: Request, output: Output) -> tuple[list[float], list[float]]:
        """For each token of `output`, by the model's own forward pass without our cache, attention and scheduler: the
        log-probability of that token, and of the likeliest one."""

    def clear_caches(self) -> None:
        """Empty every cache of prompts and media. May be called again."""

    async def aclear_caches(self) -> None:
        """`clear_caches`, for a caller whose event loop must not wait."""

    def held(self) -> dict[str, int]:
        """What the caches hold now, in items, by name."""

    def close(self) -> None:
        """Give back everything. May be called at any time and again."""


@runtime_checkable
class Foresees(Protocol):
    """An engine that can tell what a step will take before its weights are read."""

    def least_peak(self) -> int:
        """Bytes that the costliest step takes at least above what stays; 0 where that is not known. Only while `load`
        asks whether the weights are admitted; takes tenths of a second."""


@runtime_checkable
class Outlines(Protocol):
    """An engine that only asks how large things are."""

    def outlined(self, spec: ItemSpec) -> MediaInputs | None:
        """What `media_inputs` would make of an item of that shape: numbers as they are, and tensors of pixels or
        samples that have the right shape and no memory. None where only real pixels or samples can tell."""


@runtime_checkable
class RunsBeside(Protocol):
    """An engine that can leave work beside the reading of its weights."""

    beside: Beside | None
    """Where to; set before `load`."""


@runtime_checkable
class Primes(Protocol):
    """An engine for which an import server can do more than import."""

    @staticmethod
    def prime() -> None:
        """Make what libraries make once in a process. Makes no thread and asks no device."""


@runtime_checkable
class HasFolder(Protocol):
    """An engine whose model is a folder of files."""

    model_folder: Path
    """Known once the weights are to be admitted."""
