"""One run as text: the tables after a run, and the closing line."""

from __future__ import annotations

from orchestrator.memory.budget import LIMITS
from orchestrator.records import LedgerRecord, RunRecord
from orchestrator.report import facts
from orchestrator.report.layout import Row, Table, one_line, percent, render, seconds
from orchestrator.units import GiB, format_size


def table(record: RunRecord) -> str:
    """The run as a person reads it: where the time went, what holds the memory, the KV cache, what went wrong."""
    parts = [headline(record), render(stage_table(record))]
    memory = memory_table(record)
    parts.append(render(memory) if memory else "memory: not measured")
    parts += ["\n".join(lines) for lines in (kv_lines(record), error_lines(record), record.messages) if lines]
    return "\n\n".join(parts)


def headline(record: RunRecord) -> str:
    """Run, verdict, model and device in one line."""
    device = record.device
    named = [f"{device.get('name', 'unknown')} ({device.get('kind', '?')})" if device else "", facts.model_name(record)]
    torch = record.versions.get("torch")
    known = [text for text in (*reversed(named), f"torch {torch}" if torch else "") if text]
    verdict = record.status if record.status == "ok" else f"{record.status.upper()} {facts.stopped_at(record)}"
    return one_line(", ".join([f"run {record.run_id}: {verdict}", *known]))


def stage_table(record: RunRecord) -> Table:
    """Seconds, and share of the whole run, of every top-level interval and of its parts."""
    rows = []
    for each in facts.intervals(record):
        rows.append(Row(each.name, (seconds(each.wall_s), percent(each.wall_s, record.total_s)), each.note))
        rows += [Row(name, (seconds(s), percent(s, record.total_s)), indent=1) for name, s in each.parts]
    ready = f"ready after {record.ready_s:.3f} s" if record.ready_s is not None else "never ready"
    rows.append(Row("total", (seconds(record.total_s), percent(record.total_s, record.total_s)), ready))
    return Table(("stage", "seconds", "share"), tuple(rows))


def memory_table(record: RunRecord) -> Table | None:
    """The ledger: sizes and shares of the device's total; None where a run ended before it was opened."""
    ledger = record.ledger
    if ledger is None:
        return None
    accounts = facts.accounts(record)
    peak = accounts.pop("peak_activation", None)
    rows = [_size_row(name, size, ledger) for name, size in accounts.items()]
    rows.append(_size_row("residual", ledger.residual_bytes, ledger, "read, and in no account"))
    rows.append(_size_row("peak_activation", peak, ledger, facts.peak_parts(record)))
    rows.append(_size_row("unused", ledger.unused_bytes, ledger))
    used = facts.util(record)
    share = f"gpu.util {used:g} of the total" if used is not None else ""
    rows.append(_size_row("requested", ledger.requested_bytes, ledger, share))
    rows.append(_size_row("other processes", ledger.other_processes_bytes, ledger))
    source = f"read from {ledger.source}" + (f": {ledger.source_reason}" if ledger.source_reason else "")
    rows.append(_size_row("total", ledger.total_bytes, ledger, source))
    rows.append(_size_row("peak held", ledger.peak_held_bytes, ledger))
    return Table(("memory", "size", "share"), tuple(rows))


def _size_row(name: str, size: int | None, ledger: LedgerRecord, note: str = "") -> Row:
    return Row(name, ("-" if size is None else format_size(size), percent(size, ledger.total_bytes)), note)


def kv_lines(record: RunRecord) -> list[str]:
    kv = record.kv_cache
    if kv is None:
        return []
    limited = f", limited by {_limit(record)}" if kv.limited_by else ""
    return [
        f"KV cache: {kv.num_gpu_blocks:,} blocks of {kv.block_size} tokens = {kv.num_tokens:,} tokens, "
        f"{format_size(kv.bytes_per_block)} a block, {kv.max_concurrency:.1f} requests of the greatest length{limited}"
    ]


def error_lines(record: RunRecord) -> list[str]:
    """What ended a run that is not ok, in full; with the traceback of an error that nobody raised on purpose."""
    if record.status == "ok":
        return []
    error = record.error
    what = f"{error.type}: {error.message.strip()}" if error else facts.stopped_by(record)
    trace = [error.traceback.rstrip()] if error and error.traceback else []
    return [f"{record.status} {facts.stopped_at(record)}: {what}", *trace]


def closing_line(record: RunRecord) -> str:
    """The run in one line of comma-separated `name value` pairs, also of one that did not finish.

    Sizes are in GiB. `-` stands for what was not reached. `non-torch` is everything that torch did not allocate: the
    context and the libraries. The reason of a failure comes last, because it may hold commas.
    """
    ok = record.status == "ok"
    parts = [f"status {record.status}", *([] if ok else [f"stopped {facts.stopped_at(record)}"])]
    parts += _memory_pairs(record) + _kv_pairs(record)
    parts.append(f"ready in {record.ready_s:.2f} s" if record.ready_s is not None else "never ready")
    parts.append(f"total time {record.total_s:.2f} s")
    return one_line(", ".join([*parts, *([] if ok else [f"because {facts.stopped_by(record)}"])]))


def _memory_pairs(record: RunRecord) -> list[str]:
    accounts = facts.accounts(record)
    used = facts.util(record)

    def size(*names: str) -> str:
        charged = [accounts[name] or 0 for name in names if accounts.get(name) is not None]
        return _gib(sum(charged)) if charged else "-"

    ledger = record.ledger
    return [
        f"total {_gib(ledger.total_bytes) if ledger else '-'}",
        f"util {used:g}" if used is not None else "util -",
        f"requested {_gib(ledger.requested_bytes) if ledger else '-'}",
        f"weights {size('weights')}",
        f"non-torch {size('context', 'non_torch')}",
        f"activation peak {size('peak_activation')}",
        f"graphs {size('cudagraph')}",
    ]


def _kv_pairs(record: RunRecord) -> list[str]:
    kv = record.kv_cache
    if kv is None:
        return ["KV -", "- blocks", "- tokens"]
    charged = facts.accounts(record).get("kv_cache") or kv.bytes
    limited = [f"limited by {_limit(record)}"] if kv.limited_by else []
    return [
        f"KV {_gib(charged)}",
        f"{kv.num_gpu_blocks} blocks of {kv.block_size}",
        f"{kv.num_tokens} tokens",
        *limited,
    ]


def _limit(record: RunRecord) -> str:
    by = record.kv_cache.limited_by if record.kv_cache else ""
    if by == "free" and record.ledger:
        return f"free memory beside {_gib(record.ledger.other_processes_bytes)} of other processes"
    return LIMITS.get(by, by)


def _gib(size: int) -> str:
    return f"{size / GiB:.{2 if abs(size) >= GiB else 4}f} GiB"
