"""From hidden states to tokens: the model's output layer, called by us as its weights lie."""

from __future__ import annotations

from typing import Any

import torch

from orchestrator.engine.likeliest import likeliest

_ALIGNED = 64
"""Tokens whose logits one product makes: a multiple of so many. Over rows of odd length, as of InternVL2.5's 92,553
tokens, cuBLAS has no kernel of this age: 2.0 ms instead of 0.26 for 256 rows on an H200."""


class Head:
    """The output layer of a model.

    Args:
        module: what `get_output_embeddings` gives.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        plain = type(module) is torch.nn.Linear and module.bias is None
        self._splits = plain and module.weight.shape[0] % _ALIGNED != 0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(rows, vocabulary) of hidden states (rows, hidden size); rows may lie apart."""
        if not self._splits:
            logits: torch.Tensor = self._module(hidden)
            return logits
        weight = self._module.weight
        rows, vocabulary = hidden.shape[0], weight.shape[0]
        most = vocabulary // _ALIGNED * _ALIGNED
        padded = hidden.new_empty(rows, most + _ALIGNED)
        torch.mm(hidden, weight[:most].t(), out=padded[:, :most])
        # The few tokens that are left, as rows, which are aligned again.
        padded[:, most:vocabulary] = torch.mm(weight[most:], hidden.t()).t()
        return padded[:, :vocabulary]

    def likeliest(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `likeliest`, after each row of hidden states."""
        return likeliest(self.logits(hidden))
