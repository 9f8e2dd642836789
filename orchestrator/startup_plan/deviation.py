"""Whether a plan still holds, by the step that was run to see. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.startup_plan.learned import Measured, Part
from orchestrator.units import MiB, format_size

_SHARE = 0.02
_FIXED = 16 * MiB
_FRAGMENTS = 64 * MiB
"""Free parts of segments that stay reserved, which a step may use before it reserves more."""


def deviation(measured: Measured, found: Mapping[str, int], slack: int) -> str | None:
    """What does not hold; None if everything does.

    In a profile media come from the host call by call; in the repeated step they lie on the device beside what a call
    is given of them, so it may take so much more.

    Args:
        found: by part, live bytes at the worst moment that were gone after it.
        slack: how far the device's readings stray.
    """
    for name, part in measured.parts.items():
        if name not in found:
            return f"{name} is not a part of the step"
        allowed = _FIXED + slack + int(_SHARE * max(part.live, found[name]))
        if not part.live - allowed <= found[name] <= part.live + part.inputs + allowed:
            return f"{name} takes {format_size(found[name])}, and {format_size(part.live)} were expected"
        if _reserves_less_than_it_needs(part, slack):
            reserved, above = format_size(part.reserved), format_size(part.above)
            return f"{name} is said to reserve {reserved} for {above} of tensors"
    unknown = sorted(found.keys() - measured.parts.keys())
    return f"of {', '.join(unknown)} it says nothing" if unknown else None


def _reserves_less_than_it_needs(part: Part, slack: int) -> bool:
    return part.reserved + _FRAGMENTS + slack + int(_SHARE * part.above) < part.above


def differs(learned: int, now: int, slack: int) -> bool:
    """Whether a size that nothing was decided by is another than it was."""
    return abs(learned - now) > _FIXED + slack + int(_SHARE * max(learned, now))
