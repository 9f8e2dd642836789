"""Whether one request of the greatest length fits, and if not, what would. Pure: bytes in, a refusal out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.errors import BudgetError
from orchestrator.memory.budget import blocks_needed, requested_bytes
from orchestrator.units import format_size


@dataclass(frozen=True)
class Room:
    """What decides whether a start can serve a request of `max_model_len` tokens.

    Attributes:
        total_bytes: of the device.
        free_bytes: what this start may hold in all: the total without what others hold.
        util: the share that it asks for; not consulted where `blocks` are given.
        charged_bytes: what it holds or needs besides the KV cache.
        blocks: usable blocks that were asked for; None for what is left.
        most_seqs: sequences that `blocks` were asked for, where they follow from the limits.
        size_of: bytes that so many usable blocks take, with the padding block.
    """

    total_bytes: int
    free_bytes: int
    util: float
    charged_bytes: int
    block_size: int
    bytes_per_block: int
    max_model_len: int
    size_of: Callable[[int], int]
    blocks: int | None = None
    most_seqs: int | None = None

    @property
    def least_blocks(self) -> int:
        return blocks_needed(num_seqs=1, max_model_len=self.max_model_len, block_size=self.block_size)

    @property
    def ceiling_bytes(self) -> int:
        """What the start may hold."""
        return self.free_bytes if self.blocks is not None else min(self.free_bytes, self.requested_bytes)

    @property
    def requested_bytes(self) -> int:
        return requested_bytes(self.total_bytes, self.util)

    @property
    def most_blocks(self) -> int:
        """Usable blocks that there is room for."""
        return most_blocks(self.ceiling_bytes - self.charged_bytes, self.bytes_per_block, self.size_of)


def most_blocks(available_bytes: int, bytes_per_block: int, size_of: Callable[[int], int]) -> int:
    """Usable blocks that fit; one more is the padding block, and mapped memory comes in whole pages."""
    blocks = max(0, available_bytes // bytes_per_block - 1)
    while blocks > 0 and size_of(blocks) > available_bytes:
        blocks -= 1
    return blocks


def refuse_if_no_request_fits(room: Room, known: str, *, certain: bool = True) -> None:
    """Refuse a start that could never serve its longest request, or has no room for the blocks it was asked for.

    Args:
        known: what `charged_bytes` consists of, for the message.
        certain: whether nothing will be charged later.

    Raises:
        BudgetError: each suggestion, given alone in the place of what was given, leaves room.
    """
    least, most = room.least_blocks, room.most_blocks
    given = room.blocks if room.blocks is not None else most
    if least <= given <= most:
        return
    wanted = room.charged_bytes + room.size_of(max(least, given))
    if given < least:
        what = f"one request of {room.max_model_len} tokens takes {least} blocks, and {given} fit"
    else:
        what = f"{given} blocks of the KV cache take {format_size(room.size_of(given))}, and {most} fit"
    if wanted > room.ceiling_bytes:
        what += f": with {known} {format_size(wanted)} are wanted, and {_there(room)}"
    works = _suggestions(room, given)
    raise BudgetError(
        what if works else f"{what}; no setting of the budget makes it fit",
        wanted_bytes=wanted,
        free_bytes=room.ceiling_bytes,
        suggestions=works,
        certain=certain,
    )


def _there(room: Room) -> str:
    size = format_size(room.ceiling_bytes)
    by_share = room.blocks is None and room.requested_bytes <= room.free_bytes
    return f"gpu.util={room.util:g} allows {size}" if by_share else f"there are {size}"


def _suggestions(room: Room, given: int) -> dict[str, str]:
    works = {
        "gpu.util": _util(room),
        "scheduler.max_model_len": _max_model_len(room, given),
        "scheduler.max_num_seqs": _max_num_seqs(room),
        "kv.bytes": _kv_bytes(room, given),
    }
    return {field: value for field, value in works.items() if value is not None}


def _util(room: Room) -> str | None:
    """The smallest share, in steps of 0.01, under which one request fits."""
    if room.blocks is not None:
        return None
    wanted = room.charged_bytes + room.size_of(room.least_blocks)
    shares = (step / 100 for step in range(1, 101))
    share = next((each for each in shares if requested_bytes(room.total_bytes, each) >= wanted), None)
    if share is None or wanted > room.free_bytes or requested_bytes(room.total_bytes, share) > room.free_bytes:
        return None
    return f"{share:.2f}"


def _max_model_len(room: Room, given: int) -> str | None:
    """The greatest length of which one request fits, or `most_seqs` of them."""
    blocks = min(given, room.most_blocks)
    if room.most_seqs is not None:
        blocks = room.most_blocks // room.most_seqs
    elif room.blocks is not None and given > room.most_blocks:
        # So many blocks were asked for, whatever the length.
        return None
    return str(blocks * room.block_size) if blocks else None


def _max_num_seqs(room: Room) -> str | None:
    if room.most_seqs is None:
        return None
    fits = room.most_blocks // room.least_blocks
    return str(fits) if fits else None


def _kv_bytes(room: Room, given: int) -> str | None:
    """The size nearest to what was asked for: of one request, or of all that fits. A size knows no share."""
    most = most_blocks(room.free_bytes - room.charged_bytes, room.bytes_per_block, room.size_of)
    if most < room.least_blocks:
        return None
    return str(max(room.least_blocks, min(given, most)) * room.bytes_per_block)
