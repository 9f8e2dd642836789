"""The model's own forward pass, for checking the engine's: no cache, attention or scheduler of ours."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from orchestrator.errors import VerificationError


@torch.inference_mode()
def oracle_logprobs(
    model: Any, prompt: Mapping[str, torch.Tensor], prompt_ids: list[int], token_ids: list[int], torch_device: str
) -> tuple[list[float], list[float]]:
    """Log-probabilities of `token_ids` after a prompt, and of the likeliest token in each place.

    Args:
        model: the transformers model.
        prompt: the processor's own output for the whole prompt.
        prompt_ids: the ids that the engine made of it.

    Raises:
        VerificationError: the engine's ids are not the processor's.
    """
    own = prompt["input_ids"][0].tolist()
    if own != prompt_ids:
        raise VerificationError(f"the engine made {len(prompt_ids)} ids of a prompt, the processor {len(own)} others")
    if not token_ids:
        return [], []
    takes = inspect.signature(model.forward).parameters
    media = {
        name: value.to(torch_device, model.dtype if value.is_floating_point() else value.dtype)
        for name, value in prompt.items()
        if name in takes and name not in ("input_ids", "attention_mask")
    }
    decoder = model.get_decoder()
    drawn = token_ids[:-1]
    if _can_follow_at_once(model, takes, media, drawn):
        with own_attention(decoder):
            row = _row(own + drawn, torch_device)
            output = model(input_ids=row, **media, logits_to_keep=len(token_ids), use_cache=False)
        return _of(output.logits[0], token_ids)
    cache = transformers.DynamicCache(config=decoder.config)
    keep = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
    row = _row(own, torch_device)
    # A model that works its positions out of the ids does so only beside a mask.
    finds_items = hasattr(model.base_model, "rope_deltas") and "mm_token_type_ids" not in takes
    mask = {"attention_mask": torch.ones_like(row)} if finds_items else {}
    with own_attention(decoder), own_positions(model.base_model), _last_positions(decoder) as last:
        first = model(input_ids=row, **mask, **media, **keep, cache=cache, use_cache=True).logits[0, -1:]
        # Apart from the prompt, because a drawn token may be a placeholder's; the last is not fed: nothing comes after.
        places = _places_after(last, len(drawn))
        feed = {"input_ids": _row(drawn, torch_device), "cache": cache, "use_cache": True}
        later = [model(**feed, **places).logits[0]] if drawn else []
    return _of(torch.cat([first, *later]), token_ids)


def _can_follow_at_once(
    model: Any, takes: Mapping[str, Any], media: Mapping[str, torch.Tensor], drawn: Sequence[int]
) -> bool:
    """Whether prompt and drawn tokens may be one pass: not where positions are worked out of the prompt, an argument is
    as long as that, or a drawn token would be taken for an item."""
    plain = media.keys() <= {"pixel_values"} and not hasattr(model.base_model, "rope_deltas")
    names = ("image_token_id", "video_token_id", "audio_token_id", "image_token_index")
    placeholders = {getattr(model.config, name, None) for name in names}
    return plain and "logits_to_keep" in takes and placeholders.isdisjoint(drawn)


def _of(logits: torch.Tensor, token_ids: list[int]) -> tuple[list[float], list[float]]:
    """Log-probabilities of the tokens by logits (tokens, vocabulary), and the highest in each place."""
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(-1, torch.tensor(token_ids).to(logits.device).unsqueeze(-1)).squeeze(-1)
    return chosen.tolist(), logprobs.amax(-1).tolist()


@contextmanager
def own_attention(decoder: Any) -> Iterator[None]:
    """PyTorch's attention in the decoder, for a while."""
    before = decoder.config._attn_implementation
    decoder.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        decoder.set_attn_implementation(before)


@contextmanager
def own_positions(base_model: Any) -> Iterator[None]:
    """Without what a model with positions on three axes remembers of its last prompt, for a while."""
    if not hasattr(base_model, "rope_deltas"):
        yield
        return
    base_model.rope_deltas = None
    try:
        yield
    finally:
        base_model.rope_deltas = None


@contextmanager
def _last_positions(decoder: Any) -> Iterator[list[torch.Tensor]]:
    """For a while, where the decoder's last token stood on three axes (3, rows, 1); nothing for a model with one."""
    seen: list[torch.Tensor] = []

    def look(_module: Any, _args: Any, given: dict[str, Any]) -> None:
        positions = given.get("position_ids")
        if positions is not None and positions.ndim == 3:
            seen[:] = [positions[-3:, :, -1:]]

    handle = decoder.register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def _places_after(last: list[torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    """Positions of the next tokens, counted on as `generate` does it; what a model's forward would work out by itself
    differs behind a video that lasts longer than it is high and wide."""
    return {"position_ids": last[0] + 1 + torch.arange(count, device=last[0].device)} if last else {}


def _row(ids: list[int], torch_device: str) -> torch.Tensor:
    return torch.tensor([ids]).to(torch_device)
