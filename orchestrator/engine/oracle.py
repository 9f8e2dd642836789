"""The model's own forward pass, for checking the engine's: no cache, attention or scheduler of ours."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

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
    keep = {"logits_to_keep": len(token_ids)} if "logits_to_keep" in takes else {}
    # The last token is not fed: nothing is predicted after it.
    ids = torch.tensor([own + token_ids[:-1]]).to(torch_device)
    with own_attention(model.get_decoder()):
        logits = model(input_ids=ids, **media, **keep, use_cache=False).logits[0, -len(token_ids) :]
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(-1, torch.tensor(token_ids).to(torch_device).unsqueeze(-1)).squeeze(-1)
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
