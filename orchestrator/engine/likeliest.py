"""The likeliest token of each row of logits, and its log-probability, without a copy of them in float32."""

from __future__ import annotations

from typing import Any

import torch


def likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (rows), int64, and their log-probabilities (rows), float32, by logits (rows, vocabulary), whose rows may
    lie apart. Of equals the first."""
    if logits.device.type == "cuda":
        return _in_one_pass(logits)
    if logits.is_meta:
        # Nothing is computed, and no more memory taken than by the kernel.
        return logits.argmax(-1), logits.amax(-1).float()
    tokens = logits.argmax(-1)
    return tokens, logprobs_of(logits, tokens)


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities (rows), float32, of one token a row."""
    return logits.log_softmax(-1, dtype=torch.float32).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _in_one_pass(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from orchestrator.engine.likeliest_kernel import likeliest_kernel

    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    launch: Any = likeliest_kernel[(rows,)]
    launch(logits, tokens, logprobs, vocabulary, logits.stride(0), COLUMNS=4096, num_warps=8)
    return tokens, logprobs
