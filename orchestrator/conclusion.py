"""What the record of a run says at its end, however the end came."""

from __future__ import annotations

from pathlib import Path

from orchestrator import pipeline
from orchestrator.errors import Interrupted, OrchestratorError
from orchestrator.memory.ledger import Ledger
from orchestrator.records import LedgerRecord, RunRecord, write_record
from orchestrator.timeline import Timeline


def set_status(record: RunRecord, stopped_by: BaseException | None) -> int:
    """Status and error of the whole run; the exit code."""
    if stopped_by is None:
        record.status = "ok"
        return 0
    record.status = "interrupted" if isinstance(stopped_by, Interrupted) else "failed"
    record.error = pipeline.error_record(stopped_by)
    return stopped_by.exit_code if isinstance(stopped_by, OrchestratorError | Interrupted) else 1


def write_as_it_stands(
    record: RunRecord, folder: Path, timeline: Timeline, ledger: Ledger | None, stopped_by: BaseException
) -> None:
    """The record of a run whose main thread no longer gets there."""
    pipeline.end_open_stage(record, stopped_by, timeline.clock.now())
    set_status(record, stopped_by)
    if ledger is not None:
        record.ledger = ledger_record(ledger)
    timeline.skip(last_end(record))
    timeline.mark("unwinding")
    record.total_s = timeline.clock.now()
    write_record(record, folder)


def last_end(record: RunRecord) -> float:
    """When the last stage that ran ended; 0 if none did."""
    return max(
        (stage.start_s + (stage.wall_s or 0.0) for stage in record.stages if stage.start_s is not None), default=0.0
    )


def ledger_record(ledger: Ledger) -> LedgerRecord:
    """The accounts as they are now."""
    return LedgerRecord(
        total_bytes=ledger.total_bytes,
        requested_bytes=ledger.requested_bytes,
        source=ledger.source,
        source_reason=ledger.source_reason,
        accounts=dict(ledger.accounts),
        other_processes_bytes=ledger.other_processes_bytes,
        residual_bytes=ledger.residual_bytes,
        unused_bytes=ledger.unused_bytes,
        held_bytes=ledger.held_bytes,
        peak_held_bytes=ledger.peak_held_bytes,
    )
