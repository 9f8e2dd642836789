"""Loading kernels while weights are read: what later steps run is run before, on a model with each layer once.

The driver loads a kernel when it is first launched, and a library chooses among its kernels by the shapes it is given.
The weights' memory is used as it lies, whatever it holds by then: of what is computed nothing is looked at, and no
number that comes out of the weights is taken for an index.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from orchestrator.config import Config
from orchestrator.device.base import Device, WorksAside
from orchestrator.engine.build import first_line
from orchestrator.engine.encoder_cache import EncoderCache
from orchestrator.engine.kv_cache import KVCache
from orchestrator.engine.likeliest import logprobs_of
from orchestrator.engine.loading import Prepared
from orchestrator.engine.runner import ModelRunner, dummy_spans, new_spans
from orchestrator.engine.sampling import Draw, draw_tokens
from orchestrator.engine.shortened import shortened
from orchestrator.engine.warming import KnownStep
from orchestrator.engine.weights.base import model_bytes
from orchestrator.engine.weights.slabs import own_tensors
from orchestrator.engine.worst_step import WorstStep
from orchestrator.modality.base import DummyBatch
from orchestrator.units import format_size

_SHARE = 40
"""The weights' bytes divided by this may be taken: loading promises to stay within 1.05 of them."""
_DRAWN_BYTES = 64
"""What drawing takes for a logit, roughly."""
_REPLACED = 16
"""Embeddings that encoder outputs replace in a step."""
_POLL_S = 0.005


def load_kernels(
    prepared: Prepared,
    config: Config,
    device: Device,
    sizes: Sequence[int],
    known: Callable[[], KnownStep | None],
    wanted: Callable[[], bool],
) -> str | None:
    """See `LoadsKernels`.

    Args:
        wanted: whether the weights are still being loaded; without memory they are waited for as long as that.
    """
    if not isinstance(device, WorksAside) or not _has_memory(prepared.model, wanted):
        return None
    budget = model_bytes(prepared.model) // _SHARE
    free = device.snapshot().free_bytes
    if free < 2 * budget:
        return f"only {format_size(free)} of the device are free"
    with device.aside():
        # Caught inside, so that no tensor of a failed step is left when the memory is given back.
        try:
            with torch.inference_mode():
                loading = _Loading(prepared, config, device, budget)
                loading.language_model(sizes)
                if (step := known()) is not None:
                    loading.encoder(step)
        except Exception as error:
            return first_line(error)
    return None


def _has_memory(model: torch.nn.Module, wanted: Callable[[], bool]) -> bool:
    """Wait until the model has memory; False where it gets none here."""
    while any(tensor.is_meta for module in model.modules() for _, tensor in own_tensors(module)):
        if not wanted():
            return False
        time.sleep(_POLL_S)
    return True


class _Loading:
    """
    Args:
        budget: bytes that may be taken.
    """

    def __init__(self, prepared: Prepared, config: Config, device: Device, budget: int) -> None:
        self._prepared, self._config, self._device, self._budget = prepared, config, device, budget
        self._place, self._dtype = device.torch_device, prepared.what.dtype
        self._model = shortened(prepared.model)
        self._runner = ModelRunner(self._model, prepared.backend, self._place, prepared.traits, 1, device.pin)

    def language_model(self, sizes: Sequence[int]) -> None:
        """Decode steps of those sizes, the likeliest tokens after them, steps with new sequences and with a context,
        and drawing."""
        spec, block_size = self._prepared.kv_spec, self._config.kv.block_size
        self._runner.compile_kernels(block_size, spec.dtype)
        cache, nothing, some = KVCache.padding_only(spec, block_size, self._place), self._rows(0), self._rows(_REPLACED)
        for size in sizes:
            self._runner.dummy_step([(1, 2)] * size, cache, nothing)
            self._runner.choose(self._zeros(size, self._runner.hidden_size))
        for spans in self._longest_steps():
            self._runner.dummy_step(spans, cache, some)
        self._products()
        self._draw()

    def encoder(self, known: KnownStep) -> None:
        """One call of the encoder for each modality, of less than it will take where that is too much."""
        share = min(1.0, self._budget / max(1, known.peak_bytes))

        def encode(batch: DummyBatch, items: dict[str, int]) -> None:
            for modality, item in batch.items.items():
                most, together = known.piece_tokens.get(modality), known.micro_batch.get(modality, 1)
                if share < 1:
                    if not self._runner.divisible(item):
                        continue
                    most, together = max(1, int((most or item.num_embeds) * share)), 1
                self._runner.set_micro_batch({modality: together}, {} if most is None else {modality: most})
                copies = [
                    replace(item, content_hash=f"{modality} {number}")
                    for number in range(min(together, items[modality]))
                ]
                kept = self._rows(item.num_embeds * len(copies))
                for each in copies:
                    kept.index.add(each.content_hash, each.num_embeds)
                self._runner.encode(copies, kept)

        step = WorstStep.of(known.step)
        step.repeat(encode, lambda *_: None, lambda _: None, self._place, self._dtype, lambda _: nullcontext())

    def _rows(self, count: int) -> EncoderCache:
        return EncoderCache(count, self._runner.encoder_width, self._dtype, self._place, self._device.pin)

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self._dtype, device=self._place)

    @property
    def _tokens(self) -> int:
        """New tokens of the longest step."""
        scheduler = self._config.scheduler
        return min(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * self._prepared.max_model_len)

    def _longest_steps(self) -> Iterator[list[tuple[int, int]]]:
        """Of as many tokens as there is room for."""
        widths = sum(linear.out_features for linear in self._linears()) + 8 * self._runner.hidden_size
        tokens = max(1, min(self._tokens, self._budget // (widths * self._dtype.itemsize)))
        limits = (self._prepared.max_model_len, self._config.scheduler.max_num_seqs)
        yield new_spans(tokens, *limits)
        yield dummy_spans(tokens, 0, *limits)
        yield dummy_spans(tokens, max(1, self._prepared.max_model_len - tokens), *limits)

    def _products(self) -> None:
        """Each product of the longest step by itself: as many rows as it will have decide its kernel."""
        for linear in self._linears():
            taken = (linear.in_features + linear.out_features) * self._dtype.itemsize
            linear(self._zeros(min(self._tokens, max(1, self._budget // taken)), linear.in_features))

    def _linears(self) -> list[Any]:
        found = [module for module in self._model.get_decoder().modules() if type(module) is torch.nn.Linear]
        return list({tuple(module.weight.shape): module for module in reversed(found)}.values())

    def _draw(self) -> None:
        """From zeros: what weights that are still being read would give must choose no token."""
        vocabulary = self._model.get_output_embeddings().weight.shape[0]
        most = max(1, self._budget // (vocabulary * _DRAWN_BYTES))
        rows = min(self._config.scheduler.max_num_seqs, most)
        logits = self._zeros(rows, vocabulary).float()
        logprobs_of(logits, draw_tokens(logits, [Draw(1.0, 0.5, (0, 0))] * rows))
