"""From a request to token ids and media, by the model's own processor.

Each media item goes through the processor once, on its placeholder alone, which gives the ids that take the
placeholder's place and the encoder's arguments. A prompt is tokenised with its placeholders as they are, one id each,
and then expanded. So an item that comes again costs nothing, and a prompt's ids equal those of the processor's call on
the whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from orchestrator.config import MediaConfig
from orchestrator.engine.base import Media, Request
from orchestrator.engine.media import (
    Decoder,
    Ears,
    RequestError,
    checked,
    content_hash,
    frames_per_second,
    processor_arguments,
)
from orchestrator.engine.media_cache import MediaCache
from orchestrator.engine.step import PlacedItem
from orchestrator.errors import CheckpointError
from orchestrator.modality.base import MediaInputs

_NOT_FOR_THE_ENCODER = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})


@dataclass(frozen=True)
class _Edges:
    """Where the inner part of an item's tokens begins and stops, and the text on both sides of it."""

    first: int
    stop: int
    before: str
    after: str


class PromptBuilder:
    """Prompts and media of one model.

    Args:
        processor: the model's processor with its options applied, or a tokenizer.
        placeholders: modality -> text that stands for an item in a prompt; empty for a text model.
        embed_ids: modality -> token id whose embedding an encoder output replaces.
        limits: what a prompt may carry.
        whole_runs: whether neighbouring encoder outputs of an item must be in one step.
        apart: modalities of which a prompt may only carry one.
        dtype: the encoder's element type: pixels and samples are rounded to it as they are made, beside the steps.

    Raises:
        CheckpointError: a placeholder is not one token of the tokenizer.
    """

    def __init__(
        self,
        processor: Any,
        placeholders: Mapping[str, str],
        embed_ids: Mapping[str, int],
        limits: MediaConfig,
        *,
        whole_runs: bool = False,
        apart: frozenset[str] = frozenset(),
        dtype: torch.dtype | None = None,
    ) -> None:
        self.processor, self.tokenizer = processor, getattr(processor, "tokenizer", processor)
        self._placeholders, self._embed_ids, self._limits = placeholders, embed_ids, limits
        self._placeholder_ids = {self._placeholder_id(text): modality for modality, text in placeholders.items()}
        self._whole_runs, self._apart, self._dtype = whole_runs, apart, dtype
        self._ears, self._fps = Ears.of(processor), frames_per_second(processor)
        self._added_ids = frozenset(self.tokenizer.get_added_vocab().values())
        self.media, self._decode = MediaCache(), Decoder()

    @property
    def modalities(self) -> tuple[str, ...]:
        return tuple(self._placeholders)

    def _placeholder_id(self, text: str) -> int:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise CheckpointError(f"the placeholder {text!r} is {len(ids)} tokens of the tokenizer; it must be one")
        return int(ids[0])

    def text(self, request: Request) -> str:
        """The prompt with a placeholder for each item: the chat template's words around it, if that is asked for."""
        if not request.chat:
            return request.text
        if not getattr(self.processor, "chat_template", None):
            return "".join(f"{self._placeholders[media.modality]}\n" for media in request.media) + request.text
        content: Any = request.text
        if self._placeholders:
            content = [{"type": media.modality} for media in request.media]
            content.append({"type": "text", "text": request.text})
        messages = [{"role": "user", "content": content}]
        return str(self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))

    def adds_special_tokens(self, request: Request, text: str) -> bool:
        """Whether tokenising adds a leading token: a template that writes it itself must not get it twice."""
        if request.chat and getattr(self.processor, "chat_template", None):
            bos = self.tokenizer.bos_token
            return self.processor is not self.tokenizer and not (bos and text.startswith(bos))
        return True

    def prompt(self, request: Request) -> tuple[list[int], tuple[PlacedItem, ...]]:
        """Token ids of a request, placeholders expanded, and its items where they lie.

        Raises:
            RequestError: more or other media than allowed, or not as many placeholders as items.
        """
        self._refuse_media(request)
        items = [self.item(media) for media in request.media]
        text = self.text(request)
        special = self.adds_special_tokens(request, text)
        edges = [self._edges(item) for item in items]
        compact = self.tokenizer.encode(self._with_edges(text, edges), add_special_tokens=special)
        marked = [self._placeholder_ids[token] for token in compact if token in self._placeholder_ids]
        if marked != [item.modality for item in items]:
            raise RequestError(
                f"the prompt has placeholders for {_count(marked)}, and the request carries "
                f"{_count([item.modality for item in items])}"
            )
        return self._expand(compact, items, edges)

    def _edges(self, item: MediaInputs) -> _Edges:
        """Ordinary tokens at the two ends of what a placeholder becomes: they may merge with those of the text beside,
        so they are tokenised together with it."""
        known = [at for at, token in enumerate(item.token_ids) if token in self._added_ids]
        if not known:
            return _Edges(0, len(item.token_ids), "", "")
        first, stop = known[0], known[-1] + 1
        before, after = (self.tokenizer.decode(part) for part in (item.token_ids[:first], item.token_ids[stop:]))
        return _Edges(first, stop, str(before), str(after))

    def _with_edges(self, text: str, edges: list[_Edges]) -> str:
        if not any(edge.before or edge.after for edge in edges):
            return text
        marks = re.compile("|".join(re.escape(mark) for mark in self._placeholders.values()))
        coming = iter(edges)

        def spelled(mark: re.Match[str]) -> str:
            edge = next(coming, None)
            return mark[0] if edge is None else f"{edge.before}{mark[0]}{edge.after}"

        return marks.sub(spelled, text)

    def _expand(
        self, compact: list[int], items: list[MediaInputs], edges: list[_Edges]
    ) -> tuple[list[int], tuple[PlacedItem, ...]]:
        ids: list[int] = []
        placed: list[PlacedItem] = []
        coming = zip(items, edges, strict=True)
        for token in compact:
            if token not in self._placeholder_ids:
                ids.append(token)
                continue
            item, edge = next(coming)
            shift = len(ids) - edge.first
            positions = tuple(shift + at for at, embeds in enumerate(item.embed_mask) if embeds)
            placed.append(PlacedItem(item, positions, _runs(positions) if self._whole_runs else ()))
            ids.extend(item.token_ids[edge.first : edge.stop])
        return ids, tuple(placed)

    def _refuse_media(self, request: Request) -> None:
        limits = self._limits.limit_per_prompt.model_dump()
        kinds = [media.modality for media in request.media]
        for modality in dict.fromkeys(kinds):
            if modality not in self._placeholders:
                takes = ", ".join(self._placeholders) or "text only"
                raise RequestError(f"the model does not take {modality} here; it takes {takes}")
            count, most = kinds.count(modality), limits.get(modality, 0)
            if count > most:
                field = f"mm.limit_per_prompt.{modality}"
                raise RequestError(f"the request carries {count} {modality} items; {field}={most}")
        together = self._apart.intersection(kinds)
        if len(together) > 1:
            raise RequestError(f"the model's processor cannot take {' and '.join(sorted(together))} in one prompt")

    def item(self, media: Media) -> MediaInputs:
        """One item through the processor, or as it was kept from last time.

        Raises:
            RequestError: too large, or not what the processor takes.
        """
        media = self._checked(media)
        key = content_hash(media, json.dumps(self._limits.processor_kwargs, sort_keys=True, default=str))
        known = self.media.get(key)
        if known is None:
            known = self.processed(media, key)
            self.media.put(known)
        return known

    def _checked(self, media: Media) -> Media:
        if media.modality not in self._placeholders:
            raise RequestError(f"the model does not take {media.modality}")
        return checked(media, self._limits, self._ears, self._decode)

    def processed(self, media: Media, key: str) -> MediaInputs:
        """One item through the processor, whatever its size; `key` becomes its `content_hash`.

        Raises:
            RequestError: the processor refuses it.
        """
        try:
            batch = self._call(self._placeholders[media.modality], [media], add_special_tokens=False)
        except (ValueError, TypeError, OSError) as error:
            raise RequestError(f"the model's processor refused the {media.modality}: {error}") from error
        ids = [int(token) for token in batch["input_ids"][0]]
        mask = [token == self._embed_ids[media.modality] for token in ids]
        if not any(mask):
            raise RequestError(f"the model's processor made no encoder tokens of the {media.modality}")
        tensors = {
            name: self._rounded(value)
            for name, value in batch.items()
            if name not in _NOT_FOR_THE_ENCODER and isinstance(value, torch.Tensor)
        }
        return MediaInputs(media.modality, ids, mask, tensors, key)

    def _rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        # A flat one has a number an item, such as the seconds of a frame, which positions are reckoned with.
        large = tensor.is_floating_point() and tensor.ndim > 1
        return tensor.to(self._dtype) if large and self._dtype is not None else tensor

    def whole(self, request: Request) -> Mapping[str, Any]:
        """The processor's own call on the whole request: what the model's own forward takes."""
        text = self.text(request)
        items = [self._checked(media) for media in request.media]
        return self._call(text, items, add_special_tokens=self.adds_special_tokens(request, text))

    def _call(self, text: str, items: Sequence[Media], *, add_special_tokens: bool) -> Mapping[str, Any]:
        options = {"add_special_tokens": add_special_tokens, "return_tensors": "pt"}
        if self.processor is self.tokenizer:
            made: Mapping[str, Any] = self.tokenizer([text], **options)
        else:
            arguments = processor_arguments(items, self._ears.rate, self._fps)
            made = self.processor(text=[text], text_kwargs=options, **arguments)
        return made


def _runs(positions: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Spans (start, stop) of neighbours among ascending positions."""
    starts = [at for at, before in zip(positions, (-2, *positions), strict=False) if at != before + 1]
    stops = [at + 1 for at, after in zip(positions, (*positions[1:], -2), strict=True) if after != at + 1]
    return tuple(zip(starts, stops, strict=True))


def _count(modalities: list[str]) -> str:
    """'2 image' or '1 image and 1 video', in the order of first use; 'nothing' for none."""
    return " and ".join(f"{modalities.count(kind)} {kind}" for kind in dict.fromkeys(modalities)) or "nothing"
