"""The ledger: what this start holds, by account.

Two identities tie the accounts to a reading. At rest the held accounts and the residual equal what the process holds;
`requested` equals the held accounts, the residual, the activation peak and what is unused. No account is computed as
the difference of others; only the residual is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.memory.budget import requested_bytes
from orchestrator.memory.snapshot import Snapshot, Source

HELD = ("weights", "context", "non_torch", "encoder_cache", "cudagraph", "kv_cache", "workspace", "fragmentation")
ACCOUNTS = (*HELD, "peak_activation")


@dataclass
class Ledger:
    """Accounts in bytes, filled by the stages that measure them."""

    total_bytes: int
    util: float
    source: Source
    source_reason: str = ""
    base_bytes: int = 0
    """What the process held before this start; of it what its allocator had reserved; of that what was allocated."""
    base_reserved_bytes: int = 0
    base_allocated_bytes: int = 0
    accounts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ACCOUNTS, 0))
    other_processes_bytes: int = 0
    other_processes_at_start_bytes: int = 0
    held_bytes: int = 0
    """The last reading at rest of what this start added to its process."""
    peak_held_bytes: int = 0

    @property
    def requested_bytes(self) -> int:
        return requested_bytes(self.total_bytes, self.util)

    @property
    def accounted_bytes(self) -> int:
        """The sum of the accounts that are held at rest."""
        return sum(self.accounts[name] for name in HELD)

    @property
    def residual_bytes(self) -> int:
        """What was read at rest and no account explains; negative where an account has more than is resident."""
        return self.held_bytes - self.accounted_bytes if self.held_bytes else 0

    @property
    def unused_bytes(self) -> int:
        return self.requested_bytes - self.accounted_bytes - self.residual_bytes - self.accounts["peak_activation"]

    def charge(self, account: str, size: int) -> None:
        """Set an account.

        Raises:
            KeyError: no such account.
            ValueError: a negative size, which no reading can mean.
        """
        if account not in self.accounts:
            raise KeyError(f"no account '{account}'; there are {', '.join(ACCOUNTS)}")
        if size < 0:
            raise ValueError(f"{account} cannot be {size} bytes")
        self.accounts[account] = size

    def held_in(self, snapshot: Snapshot) -> int:
        """What this start holds, of what its process holds."""
        return max(0, snapshot.ours_bytes - self.base_bytes)

    def non_torch_in(self, snapshot: Snapshot) -> int:
        """What this start holds outside the allocator: the context, kernels, libraries."""
        return max(0, self.held_in(snapshot) - self.reserved_in(snapshot))

    def reserved_in(self, snapshot: Snapshot) -> int:
        """What this start's tensors made the allocator reserve."""
        return max(0, snapshot.reserved_bytes - self.base_reserved_bytes)

    def fragmentation_in(self, snapshot: Snapshot) -> int:
        """What the allocator reserved for this start beyond its live tensors."""
        return max(0, self.reserved_in(snapshot) - max(0, snapshot.allocated_bytes - self.base_allocated_bytes))

    def others_in(self, snapshot: Snapshot) -> int:
        """What is neither free nor this start's."""
        return max(0, self.total_bytes - snapshot.free_bytes - self.held_in(snapshot))

    def read_at_rest(self, snapshot: Snapshot) -> None:
        """Note a reading with nothing under way: what the held accounts are compared with."""
        self.held_bytes = self.held_in(snapshot)
        self.other_processes_bytes = self.others_in(snapshot)
        self.saw(snapshot)

    def saw(self, snapshot: Snapshot) -> None:
        """Note a reading under load, the allocator's peak included."""
        above_now = max(0, snapshot.peak_reserved_bytes - snapshot.reserved_bytes)
        self.peak_held_bytes = max(self.peak_held_bytes, self.held_in(snapshot) + above_now)
