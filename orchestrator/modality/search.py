"""Looking for the costliest shape. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import isqrt, prod
from typing import TypeVar

from orchestrator.errors import UserError

Size = tuple[int, int]
"""(width, height) in pixels, or (columns, rows)."""

Cost = Callable[[int, int], int]
Shape = TypeVar("Shape", bound=tuple[int, ...])

_RATIOS = (1, 4 / 3, 3 / 2, 2, 5 / 2, 3, 4, 5, 6, 8, 12, 24, 50, 100, 199)
_LONG_SIDES = (28, 56, 112, 224, 336, 448, 672, 896, 1344, 1792, 2688, 3584, 5376)
_STEPS = 24
_KEPT = 8


def candidate_sizes(most: Size | None) -> list[Size]:
    """Sizes of many areas and aspect ratios, both ways up; inside `most` and itself among them, if that is given."""
    found = {size for ratio in _RATIOS for side in _LONG_SIDES for size in _both(side, max(1, round(side / ratio)))}
    if most is not None:
        width, height = most
        found |= (
            {(width, height)} | {fit(ratio, most) for ratio in _RATIOS} | {fit(1 / ratio, most) for ratio in _RATIOS}
        )
        found |= {(across, down) for across in _spread(width) for down in _spread(height)}
        found = {size for size in found if size[0] <= width and size[1] <= height}
    return sorted(found)


def fit(ratio: float, most: Size) -> Size:
    """The largest size inside `most` whose width is `ratio` times its height, to the pixel."""
    width, height = most
    if width / height > ratio:
        return max(1, min(width, round(height * ratio))), height
    return width, max(1, min(height, round(width / ratio)))


def costliest_of(cost: Callable[..., int], shapes: Iterable[Shape], most_tokens: int | None) -> Shape:
    """Of the shapes that cost the most, but no more than `most_tokens`, the most even, and of those the smallest; the
    cheapest if all cost more."""
    priced = {shape: cost(*shape) for shape in shapes}
    within = [shape for shape, tokens in priced.items() if most_tokens is None or tokens <= most_tokens]
    if not within:
        return min(priced, key=lambda shape: (priced[shape], _uneven(shape), prod(shape)))
    return max(within, key=lambda shape: (priced[shape], -_uneven(shape), -prod(shape)))


def refined(cost: Cost, sizes: Iterable[Size], most: Size | None, most_tokens: int | None) -> Size:
    """`costliest_of` the sizes, and from the best few a walk to neighbours that cost more, in ever smaller steps."""
    priced = {size: cost(*size) for size in sizes}
    allowed = {size: tokens for size, tokens in priced.items() if most_tokens is None or tokens <= most_tokens}
    best = sorted(allowed, key=lambda size: (-allowed[size], prod(size)))[:_KEPT]
    for start in best:
        size = _climb(cost, start, most, most_tokens)
        priced[size] = cost(*size)
    return costliest_of(cost, priced, most_tokens)


def best_grid(cells: int, most: Size | None, ratio: int) -> Size | None:
    """(columns, rows) with the most cells, at most `cells`, inside `most`, neither side over `ratio` times the other;
    of equally good ones the most even. None if there is none."""
    best: tuple[int, int, Size] | None = None
    for short in range(1, isqrt(max(0, cells)) + 1):
        for wide in (True, False):
            long = min(cells // short, short * ratio)
            if most is not None:
                across, down = most if wide else (most[1], most[0])
                if short > down:
                    continue
                long = min(long, across)
            if long < 1:
                continue
            grid = (long, short) if wide else (short, long)
            found = (long * short, -abs(long - short), grid)
            best = found if best is None else max(best, found)
    return None if best is None else best[2]


def most_that_fit(cost: Callable[[int], int], upper: int, most_tokens: int | None) -> int:
    """The largest number up to `upper`, at least 1, that costs no more than `most_tokens`; `cost` never falls."""
    if most_tokens is None or cost(upper) <= most_tokens:
        return upper
    low, high = 1, upper
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= most_tokens else (low, middle)
    return low


def bounded(modality: str, field: str, *bounds: int | None) -> int:
    """The smallest of the bounds that are known.

    Raises:
        UserError: none is.
    """
    known = [bound for bound in bounds if bound is not None]
    if not known:
        raise UserError(f"nothing says how long a {modality} may be; give {field}, or mm.limit_per_prompt.{modality}=0")
    return max(1, min(known))


def _climb(cost: Cost, size: Size, most: Size | None, most_tokens: int | None) -> Size:
    tokens, step = cost(*size), max(1, max(size) // 16)
    while step:
        better = None
        for neighbour in _neighbours(size, step, most):
            found = cost(*neighbour)
            if found > tokens and (most_tokens is None or found <= most_tokens):
                better, tokens = neighbour, found
        size, step = (better, step) if better else (size, step // 2)
    return size


def _neighbours(size: Size, step: int, most: Size | None) -> Iterator[Size]:
    for across in (-step, 0, step):
        for down in (-step, 0, step):
            width, height = size[0] + across, size[1] + down
            if width >= 1 and height >= 1 and (most is None or (width <= most[0] and height <= most[1])):
                yield width, height


def _uneven(shape: tuple[int, ...]) -> float:
    return max(shape[-2:]) / min(shape[-2:])


def _spread(side: int) -> set[int]:
    return {max(1, side * step // _STEPS) for step in range(1, _STEPS + 1)}


def _both(long: int, short: int) -> tuple[Size, Size]:
    return (long, short), (short, long)
