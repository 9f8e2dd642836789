"""A planned start by formulas instead of a model, so that searches can be checked against every value."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.compose import compose
from orchestrator.config import Config
from orchestrator.memory.ledger import ACCOUNTS
from orchestrator.records import ErrorRecord, KVCacheRecord, LedgerRecord, RunRecord, StageRecord
from orchestrator.units import KiB, MiB

ITEM_TOKENS = 256
BLOCK_BYTES = 512 * KiB


@dataclass
class FormulaPlan:
    """Peaks that grow with every limit that can be asked for; counts how often it is asked."""

    weights: int = 4 * 1024 * MiB
    asked: list[list[str]] = field(default_factory=list)

    def __call__(self, overrides: list[str]) -> RunRecord:
        self.asked.append(overrides)
        return record_of(compose(overrides).config, self.weights)


def peaks_of(config: Config) -> dict[str, int]:
    longest = config.scheduler.max_model_len
    assert isinstance(longest, int)
    return {
        "language_model": 300 * MiB + 20 * KiB * longest,
        "logits": MiB * config.scheduler.max_num_seqs,
        "encoder.image": 150 * MiB * config.mm.limit_per_prompt.image,
    }


def _wanted_blocks(config: Config, longest: int) -> int | None:
    if config.kv.bytes == "need":
        return config.scheduler.max_num_seqs * -(-longest // config.kv.block_size)
    return None if config.kv.bytes == "auto" else int(config.kv.bytes) // BLOCK_BYTES


def record_of(config: Config, weights: int) -> RunRecord:
    """What a start comes to; a failed one where a sequence of the greatest length does not fit."""
    spec, scheduler = config.gpu.spec, config.scheduler
    assert spec is not None and isinstance(scheduler.max_model_len, int)
    total = spec.total_bytes if config.gpu.total_bytes is None else int(config.gpu.total_bytes)
    peaks = peaks_of(config)
    accounts = dict.fromkeys(ACCOUNTS, 0) | {
        "weights": weights,
        "context": spec.context_bytes,
        "non_torch": spec.library_bytes,
        "cudagraph": 2 * MiB * scheduler.max_num_seqs,
        "peak_activation": max(peaks.values()),
    }
    requested = min(round(total * config.gpu.util), total - spec.driver_bytes)
    wanted = _wanted_blocks(config, scheduler.max_model_len)
    left = (requested if wanted is None else total - spec.driver_bytes) - sum(accounts.values())
    most = max(0, left // (2 * MiB) * 2 * MiB // BLOCK_BYTES - 1)
    blocks = most if wanted is None else wanted if wanted <= most else 0
    record = RunRecord(run_id="plan", started_at="", status="ok")
    record.stages = [
        StageRecord(slot="dummy_data", use="dummy_data", origin="built-in"),
        StageRecord(slot="profile_run", use="profile_run", origin="built-in", metrics={"peaks_bytes": peaks}),
    ]
    record.stages[0].metrics = {"modalities": {"image": {"tokens": ITEM_TOKENS}}}
    if blocks * config.kv.block_size < scheduler.max_model_len:
        record.status, record.error = "failed", ErrorRecord(type="BudgetError", message="no room")
        return record
    accounts["kv_cache"] = -(-(blocks + 1) * BLOCK_BYTES // (2 * MiB)) * 2 * MiB
    tokens = blocks * config.kv.block_size
    record.ledger = LedgerRecord(
        total_bytes=total,
        requested_bytes=requested,
        source="planned",
        accounts=accounts,
        other_processes_bytes=spec.driver_bytes,
        residual_bytes=0,
        peak_held_bytes=0,
    )
    record.kv_cache = KVCacheRecord(
        num_gpu_blocks=blocks,
        block_size=config.kv.block_size,
        bytes_per_block=BLOCK_BYTES,
        bytes=blocks * BLOCK_BYTES,
        num_tokens=tokens,
        max_concurrency=tokens / scheduler.max_model_len,
    )
    return record
