"""The engine that serves transformers models, their code untouched, over a paged KV cache."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from orchestrator.beside import Beside
from orchestrator.cache import Entry
from orchestrator.config import Config
from orchestrator.device.base import Device
from orchestrator.engine.base import CapturedGraph, Event, KVSpec, Media, Output, Request, WeightsReport
from orchestrator.engine.dummy_spans import dummy_spans, new_spans
from orchestrator.engine.encoder_cache import EncoderCache
from orchestrator.engine.feed import worker_count
from orchestrator.engine.generate import Limits, Scheduler
from orchestrator.engine.inputs import PromptBuilder
from orchestrator.engine.kernel_loading import load_kernels
from orchestrator.engine.kv_cache import KVCache
from orchestrator.engine.loading import Loaded, Prepared, load, prepare
from orchestrator.engine.oracle import oracle_logprobs
from orchestrator.engine.paged_memory import PagedMemory
from orchestrator.engine.prompting import Prompting
from orchestrator.engine.remembering import Around
from orchestrator.engine.requests import open_request, output_of
from orchestrator.engine.serving import Serving
from orchestrator.engine.step import Step, StepRecord
from orchestrator.engine.worst_step import WorstStep
from orchestrator.errors import StageError
from orchestrator.events import Events
from orchestrator.modality.base import DummyBatch, MediaInputs


class TransformersEngine:
    """Implements `Engine` for models of transformers.

    Args:
        resolve: (plugin group, name) -> what the name means.
        cache_dir: where models that the project makes are kept; None for the configured one.
    """

    kv_spec: KVSpec
    max_model_len: int
    processor_identity: str
    encoder_dtype: str
    model_config: Any
    model_folder: Path
    plan_identity: dict[str, Any]

    def __init__(
        self, config: Config, device: Device, resolve: Callable[[str, str], Any], cache_dir: Path | None
    ) -> None:
        self._config, self._device, self._resolve = config, device, resolve
        self._cache_dir = cache_dir or Path(config.cache.dir).expanduser()
        self.beside: Beside | None = None
        self._prompting: Callable[[], Prompting] | None = None
        self._prepared: Prepared | None = None
        self._loaded: Loaded | None = None
        self._memory: PagedMemory | None = None
        self._encoder: EncoderCache | None = None
        self._largest_items: dict[str, int] = {}
        self._scheduler: Scheduler | None = None
        self._current: Serving | None = None
        self._worst = WorstStep()
        self._replays = True
        self.steps: list[StepRecord] = []
        """The steps of the last `generate`."""

    @staticmethod
    def imports(config: Config) -> tuple[str, ...]:
        return ("torch", "torchvision", "transformers")

    @staticmethod
    def prime() -> None:
        """transformers' table of what the checkpoints of all its models call their tensors."""
        get_checkpoint_conversion_mapping("")  # type: ignore[no-untyped-call]

    def load(self, events: Events, admit: Callable[[int], None] | None = None) -> WeightsReport:
        config, device, resolve = self._config, self._device, self._resolve
        prepared = prepare(config, device, resolve, self._cache_dir, self.beside)
        # Whoever admits the weights asks for these.
        self.kv_spec, self.max_model_len = prepared.kv_spec, prepared.max_model_len
        self._prompting, self.model_config = prepared.prompting, prepared.what.config
        self.encoder_dtype, self.processor_identity = prepared.what.dtype_name, prepared.processor_identity
        self.plan_identity, self.model_folder = prepared.identity, prepared.found.folder
        self._prepared = prepared
        try:
            loaded = load(prepared, config, device, resolve, events, admit)
        finally:
            self._prepared = None
        self._loaded = loaded
        self._encoder = self._encoder_cache(0)
        return loaded.report

    def load_kernels(self) -> str | None:
        """See `LoadsKernels`."""
        prepared = self._prepared
        if prepared is None:
            return None
        return load_kernels(prepared, self._config, self._device, lambda: self._prepared is prepared)

    def least_peak(self) -> int:
        """See `Foresees`."""
        from orchestrator.engine.planning.foresight import least_peak

        return 0 if self._prepared is None else least_peak(self._prepared, self._config)

    @property
    def processor(self) -> Any:
        return self._prompts.processor

    @property
    def _prompts(self) -> PromptBuilder:
        if self._prompting is None:
            raise StageError("the engine has no processor: load comes first, and close ends it")
        return self._prompting().builder

    def modalities(self) -> tuple[str, ...]:
        return self._prompts.modalities

    def media_inputs(self, media: Media) -> MediaInputs:
        """See `Engine`.

        Raises:
            RequestError: too large, of a modality that the model does not take, or refused by the processor.
        """
        return self._prompts.item(media)

    def prompt_tokens(self, request: Request) -> int:
        """See `Engine`.

        Raises:
            RequestError: the request cannot be served, whatever its length.
        """
        return len(self._prompts.prompt(request)[0])

    def reserve_encoder_cache(self, tokens: int) -> int:
        self._need()
        self._encoder = None
        self._encoder = self._encoder_cache(tokens)
        return self._encoder.bytes

    def _encoder_cache(self, tokens: int) -> EncoderCache:
        loaded, device = self._need(), self._device
        return EncoderCache(tokens, loaded.runner.encoder_width, loaded.what.dtype, device.torch_device, device.pin)

    def encode_dummy(self, batch: DummyBatch, items: dict[str, int]) -> None:
        encoder = self._need_encoder()
        self._worst.encoded(batch, items)
        # Of an earlier call's copies, some would make room for this one's, and not always the ones it does without.
        encoder.index.clear()
        for modality, count in items.items():
            item = batch.items[modality]
            largest = batch.tokens_per_item[modality]
            self._largest_items[modality] = max(self._largest_items.get(modality, 0), largest)
            # Each copy is an item of its own to the cache, over the same tensors.
            copies = [replace(item, content_hash=f"dummy {modality} {number}") for number in range(count)]
            for copy in copies:
                encoder.index.add(copy.content_hash, copy.num_embeds)
            self._need().runner.encode(copies, encoder)

    def set_micro_batch(self, items: Mapping[str, int], most_tokens: Mapping[str, int] | None = None) -> None:
        self._need().runner.set_micro_batch(items, most_tokens or {})

    def divisible(self, item: MediaInputs) -> bool:
        return self._need().runner.divisible(item)

    def compile_kernels(self) -> None:
        self._need().runner.compile_kernels(self._config.kv.block_size, self.kv_spec.dtype)

    def dummy_step(self, num_tokens: int, context: int) -> None:
        """See `Engine`. Where new sequences take a way of their own, their step runs too."""
        peaks = []
        for spans in self._ways(num_tokens, context):
            self._compute(spans)
            # Peaks only rise: a later one is higher only if it took more.
            peaks.append(self._device.snapshot().peak_bytes)
        self._worst.computed(num_tokens, context, peaks.index(max(peaks)))

    def _repeat_step(self, num_tokens: int, context: int) -> None:
        ways, most = self._ways(num_tokens, context), self._worst.variant
        for spans in ways if most is None else ways[most : most + 1]:
            self._compute(spans)

    def _ways(self, num_tokens: int, context: int) -> list[list[tuple[int, int]]]:
        limits = (self.max_model_len, self._config.scheduler.max_num_seqs)
        ways = [dummy_spans(num_tokens, context, *limits)]
        return [*ways, new_spans(num_tokens, *limits)] if self._need().runner.new_apart else ways

    def _compute(self, spans: list[tuple[int, int]]) -> None:
        self._need().runner.dummy_step(spans, self._need_memory().padding(), self._need_encoder())

    def dummy_logits(self, num_rows: int) -> None:
        self._worst.drew(num_rows)
        self._need().runner.dummy_logits(num_rows)

    def repeat_worst_step(self) -> None:
        """See `Engine`."""
        self.repeat_parts(lambda part: nullcontext())

    def repeat_parts(self, around: Around) -> None:
        """See `RemembersSteps`."""
        dtype, place = self._need().model.dtype, self._device.torch_device
        self._worst.repeat(self.encode_dummy, self._repeat_step, self.dummy_logits, place, dtype, around)
        self._need_encoder().index.clear()

    def remembered_step(self) -> Entry:
        """See `RemembersSteps`."""
        step = self._worst.entry()
        return Entry(step.tensors, {**step.meta, "largest_items": self._largest_items})

    def adopt_step(self, step: Entry) -> None:
        """See `RemembersSteps`."""
        self._worst = WorstStep.of(step)
        self._largest_items = {str(name): int(most) for name, most in step.meta.get("largest_items", {}).items()}

    @contextmanager
    def eager(self) -> Iterator[None]:
        self._replays = False
        try:
            yield
        finally:
            self._replays = True

    @property
    def most_blocks_used(self) -> int:
        return self._need_memory().pool.most_taken

    @property
    def keeps_graphs(self) -> bool:
        return self._config.graphs.mode == "keep" and self._device.virtual_memory_refusal is None

    def capture(self, sizes: Sequence[int]) -> list[CapturedGraph]:
        return self._need_memory().capture(self._need().runner, self._need_encoder(), sizes)

    def kv_bytes(self, num_blocks: int) -> int:
        return self._need_memory().bytes_for(num_blocks)

    def allocate_kv(self, num_blocks: int) -> int:
        return self._need_memory().allocate(num_blocks)

    def generate(self, requests: Sequence[Request]) -> list[Output]:
        """See `Engine`. A request that cannot be served ends with `error`; the others go on.

        Raises:
            StageError: there is no KV cache yet, or other requests are being served.
        """
        # A generator can be read only once.
        asked = tuple(requests)
        with self._serving(asked, streams=False) as serving:
            for _ in serving.run():
                pass
        loaded = self._need()
        return [output_of(loaded, request, each) for request, each in zip(asked, serving.sequences, strict=True)]

    def stream(self, requests: Sequence[Request]) -> Iterator[Event]:
        """See `Engine`; raises what `generate` raises, once the first event is asked for."""
        with self._serving(requests, streams=True) as serving:
            yield from serving.events()

    def cancel(self, request_id: str) -> None:
        serving = self._current
        if serving is not None:
            serving.cancel(request_id)

    @contextmanager
    def _serving(self, requests: Sequence[Request], *, streams: bool) -> Iterator[Serving]:
        """What serves these requests, and nothing else as long as it is entered."""
        encoder, memory = self._need_encoder(), self._need_memory()
        cache = memory.cache
        if cache is None:
            raise StageError("requests came before allocate_kv")
        if self._current is not None:
            raise StageError("other requests are being served: end or close their stream first")
        scheduler = Scheduler(self._limits(encoder), cache.block_size, memory.pool, encoder.index)
        self._scheduler, self.steps = scheduler, scheduler.records
        self._current = serving = Serving(
            requests,
            partial(open_request, self._need(), streams=streams),
            scheduler,
            lambda step: self._execute(step, cache, encoder),
            encoder.index,
            ahead=self._config.scheduler.max_num_seqs,
            workers=worker_count(),
            step_tokens=self._config.scheduler.max_num_batched_tokens,
        )
        try:
            yield serving
        finally:
            self._current = None

    def _execute(self, step: Step, kv_cache: KVCache, encoder: EncoderCache) -> list[tuple[int, float]]:
        graphs = self._need_memory().graphs
        if self._replays and graphs is not None and graphs.takes(step):
            return graphs.execute(step)
        return self._need().runner.execute(step, kv_cache, encoder)

    def _limits(self, encoder: EncoderCache) -> Limits:
        scheduler, given = self._config.scheduler, self._config.encoder.compute_budget
        # `auto` is what was profiled; without a profile, whatever the cache can take.
        largest = max(self._largest_items.values(), default=encoder.index.capacity)
        auto = max(scheduler.max_num_batched_tokens, largest)
        budget = auto if given == "auto" else given
        return Limits(
            max_model_len=self.max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            encoder_compute_budget=int(budget),
            most_item_tokens=self._largest_items,
        )

    def oracle_logprobs(self, request: Request, output: Output) -> tuple[list[float], list[float]]:
        loaded = self._need()
        whole = loaded.prompts.whole(request)
        return oracle_logprobs(
            loaded.model, whole, output.prompt_token_ids, output.token_ids, self._device.torch_device
        )

    def clear_caches(self) -> None:
        if self._loaded is not None:
            self._loaded.prompts.media.clear()
        if self._encoder is not None:
            self._encoder.index.clear()

    async def aclear_caches(self) -> None:
        await asyncio.to_thread(self.clear_caches)

    def held(self) -> dict[str, int]:
        return {
            "encoder outputs": len(self._encoder.index) if self._encoder else 0,
            "media inputs": len(self._loaded.prompts.media) if self._loaded else 0,
            "requests": self._scheduler.num_open if self._scheduler else 0,
        }

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
        self._prompting = self._loaded = self._memory = self._encoder = self._scheduler = self._current = None
        # Modules refer to each other; without a collection their memory would stay until some later one.
        gc.collect()
        self._device.empty_cache()

    def _need(self) -> Loaded:
        if self._loaded is None:
            raise StageError("the engine has no weights: load comes first, and close ends it")
        return self._loaded

    def _need_memory(self) -> PagedMemory:
        self._need()
        if self._memory is None:
            self._memory = PagedMemory(
                self._device, self.kv_spec, self._config.kv.block_size, self.max_model_len, keep=self.keeps_graphs
            )
        return self._memory

    def _need_encoder(self) -> EncoderCache:
        if self._encoder is None:
            raise StageError("the engine has no weights: load comes first, and close ends it")
        return self._encoder
