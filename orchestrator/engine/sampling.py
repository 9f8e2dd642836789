"""Tokens drawn at random, each by its request's own numbers: what else is in a step does not matter.

Noise is a hash of (seed, number of the token in its output, token id), computed where the logits are, so a request gets
the same noise alone and in any batch, on any device, in a captured step or not. The token is the one whose scaled logit
plus Gumbel noise is highest, which draws from the softmax; a small change of the logits changes it rarely.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from numbers import Integral

import torch

from orchestrator.engine.base import Request
from orchestrator.engine.media import RequestError

_ROWS = 32
"""Rows that are drawn together: bounds what sorting and noise take to less than the logits of a full batch."""
_MIX = 0x45D9F3B
"""Below 2**31, so that its product with 32 bits stays within 63."""
_LOW = 0xFFFFFFFF


@dataclass(frozen=True)
class Draw:
    """How one row's token is drawn.

    Attributes:
        keys: two numbers of 32 bits, from which the row's noise is made.
    """

    temperature: float
    top_p: float
    keys: tuple[int, int]


@dataclass(frozen=True)
class Sampling:
    """What a request says about how its tokens are drawn. `temperature` is above 0."""

    temperature: float
    top_p: float
    seed: int

    @classmethod
    def of(cls, request: Request) -> Sampling | None:
        """None for a request whose tokens are the likeliest ones.

        Raises:
            RequestError: a value that nothing can be drawn with.
        """
        temperature, top_p, seed = request.temperature, request.top_p, request.seed
        if not (math.isfinite(temperature) and temperature >= 0):
            raise RequestError(f"temperature is {temperature}: it must be 0 or a positive number")
        if not 0 < top_p <= 1:
            raise RequestError(f"top_p is {top_p}: it must be above 0 and at most 1")
        if not isinstance(seed, Integral):
            raise RequestError(f"seed is {seed!r}: it must be a whole number")
        return cls(temperature, top_p, seed) if temperature > 0 else None

    def draw(self, index: int) -> Draw:
        """For the token number `index` of the output."""
        digest = blake2b(f"{self.seed} {index}".encode(), digest_size=8).digest()
        return Draw(
            self.temperature, self.top_p, (int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:], "big"))
        )


def draw_tokens(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Tokens (rows), int64, for logits (rows, vocabulary), float32, with one draw a row."""
    parts = zip(torch.split(logits, _ROWS), _parts(draws), strict=True)
    return torch.cat([_draw(part, each) for part, each in parts])


def _parts(draws: Sequence[Draw]) -> list[Sequence[Draw]]:
    return [draws[first : first + _ROWS] for first in range(0, len(draws), _ROWS)]


def _draw(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    device = logits.device
    numbers = torch.tensor([(draw.temperature, draw.top_p) for draw in draws], dtype=torch.float32).to(device)
    keys = torch.tensor([draw.keys for draw in draws], dtype=torch.int64).to(device)
    # Relative to the highest, so that a temperature near 0 makes no infinity but for tokens that cannot be drawn.
    scaled = (logits - logits.amax(-1, keepdim=True)) / numbers[:, :1].clamp(min=torch.finfo(torch.float32).tiny)
    if any(draw.top_p < 1 for draw in draws):
        scaled = _keep_top(scaled, numbers[:, 1:])
    return (scaled + _gumbel(keys, logits.shape[1])).argmax(-1)


def _keep_top(scaled: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Logits with all but the likeliest tokens at -inf: as few as together have `top_p` (rows, 1) of the probability,
    and those as likely as the last of them. Rows with 1 keep all."""
    probabilities = scaled.softmax(-1)
    ordered = probabilities.sort(-1, descending=True).values
    before = ordered.cumsum(-1) - ordered
    # The likeliest has nothing before it; a rounding below 0 or a tiny `top_p` must not drop it.
    count = (before < top_p).sum(-1, keepdim=True).clamp(min=1)
    least = ordered.gather(-1, count - 1).masked_fill(top_p >= 1, 0.0)
    return scaled.masked_fill(probabilities < least, -torch.inf)


def _gumbel(keys: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Gumbel noise (rows, vocabulary), float32, from keys (rows, 2)."""
    ids = torch.arange(vocabulary, dtype=torch.int64, device=keys.device)
    mixed = _mixed(_mixed(ids ^ keys[:, :1]) ^ keys[:, 1:])
    # 23 bits and a half: exact in float32, and neither 0 nor 1, whose logarithms end it.
    uniform = ((mixed >> 9).float() + 0.5) / 2**23
    return uniform.log_().neg_().log_().neg_()


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    """A well-spread one-to-one image of numbers of 32 bits, held in int64."""
    for _ in range(2):
        bits = (((bits >> 16) ^ bits) * _MIX) & _LOW
    return (bits >> 16) ^ bits
