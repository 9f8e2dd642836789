"""The output layer and the likeliest tokens: as torch's own functions have them, also for odd vocabularies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from orchestrator.engine.head import Head
from orchestrator.engine.likeliest import likeliest, logprobs_of


@pytest.mark.parametrize("vocabulary", [64, 37, 128, 155])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_the_modules_own(vocabulary: int, bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = torch.nn.Linear(24, vocabulary, bias=bias, dtype=dtype).requires_grad_(False)
    hidden = torch.randn(5, 24, dtype=dtype)
    logits = Head(module).logits(hidden)
    torch.testing.assert_close(logits, module(hidden))
    assert bias or logits.stride(0) % 64 == 0


def test_a_layer_that_is_more_than_a_product_is_called() -> None:
    class Scaled(torch.nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(hidden)

    module = Scaled(8, 37, bias=False).requires_grad_(False)
    hidden = torch.randn(3, 8)
    torch.testing.assert_close(Head(module).logits(hidden), module(hidden))


def test_the_likeliest_token_and_its_logprob() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 300).bfloat16()
    logits[2, 7] = logits[2, 90] = 50
    tokens, logprobs = likeliest(logits)
    assert tokens.tolist() == logits.float().argmax(-1).tolist()
    assert tokens[2] == 7
    expected = logits.float().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(logprobs_of(logits, tokens), expected)


def in_one_pass() -> list[float]:
    """How many tokens of the kernel differ from torch's, and by how much at most the log-probabilities do."""
    from orchestrator.engine.likeliest import _in_one_pass

    found = []
    for vocabulary in (5, 4096, 9253):
        torch.manual_seed(vocabulary)
        # Rows that lie apart, equals, and tokens that cannot be.
        logits = torch.randn(7, vocabulary + 3).bfloat16()[:, :vocabulary]
        logits[2] = logits[2, 0]
        logits[3, 1:4] = float("-inf")
        logits[4, :] = float("-inf")
        logits[4, 4] = 3
        ours, theirs = _in_one_pass(logits), likeliest(logits)
        found += [float((ours[0] != theirs[0]).sum()), float((ours[1] - theirs[1]).abs().max())]
    return found


def test_the_kernel_equals_torch() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    code = "import json; from tests.test_head import in_one_pass as f; print(json.dumps(f()))"
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == pytest.approx([0.0] * 6, abs=1e-5)
