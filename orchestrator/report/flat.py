"""Runs as rows of one table, for spreadsheets and papers: a line a run, a column a number."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.records import RunRecord
from orchestrator.report import facts
from orchestrator.report.compare import differing, settings_of
from orchestrator.report.layout import one_line
from orchestrator.units import format_size

_SHOWN = ("ready_s", "total_s", "kv_cache.num_gpu_blocks", "kv_cache.num_tokens", "kv_cache.bytes")
"""Of the numbers, those that a page has room for, besides the accounts that are not the same in all runs."""


def as_csv(records: Sequence[RunRecord]) -> str:
    """Comma-separated values with a header: bytes as integers, times in seconds, empty where there is nothing.

    Columns are the run, the settings that differ or were given by hand, and every number of the record's head, stages,
    ledger and KV cache.
    """
    settings = _settings(records)
    rows = [_head(record) | _chosen(record, settings) | numbers(record) for record in records]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().removesuffix("\n")


def as_markdown(records: Sequence[RunRecord]) -> str:
    """A table of Markdown: what differs between the runs, seconds, and sizes in GiB, MiB or KiB."""
    settings = differing(records) if len(records) > 1 else []
    all_numbers = [numbers(record) for record in records]
    names = [name for name in _in_order(all_numbers) if name in _SHOWN or _worth_a_column(name, all_numbers)]
    header = ["run", "status", *settings, *(name.removesuffix("_bytes") for name in names)]
    lines = [header, ["---"] * (2 + len(settings)) + ["---:"] * len(names)]
    for record, found in zip(records, all_numbers, strict=True):
        chosen = _chosen(record, settings).values()
        lines.append([record.run_id, record.status, *chosen, *(_shown(name, found.get(name)) for name in names)])
    return "\n".join("| " + " | ".join(_cell(str(cell)) for cell in line) + " |" for line in lines)


def numbers(record: RunRecord) -> dict[str, float | int]:
    """Every number of a run, by its dotted name in the record; those that it does not have are left out."""
    found: dict[str, float | int | None] = {
        "ready_s": record.ready_s,
        "total_s": record.total_s,
        "import_s": record.import_s,
    }
    found |= {f"stages.{stage.slot}.wall_s": stage.wall_s for stage in record.stages}
    if record.ledger is not None:
        found |= {f"ledger.accounts.{name}": size for name, size in facts.accounts(record).items()}
        found |= {
            f"ledger.{name}": value
            for name, value in record.ledger.model_dump().items()
            if name.endswith("_bytes") and isinstance(value, int)
        }
    if record.kv_cache is not None:
        values = record.kv_cache.model_dump().items()
        found |= {f"kv_cache.{name}": value for name, value in values if isinstance(value, int | float)}
    return {name: value for name, value in found.items() if value is not None}


def _head(record: RunRecord) -> dict[str, str]:
    return {
        "run_id": record.run_id,
        "status": record.status,
        "started_at": record.started_at,
        "model": facts.model_name(record),
        "device": str(record.device.get("name", "")),
        "error": "" if record.status == "ok" else facts.stopped_by(record),
    }


def _settings(records: Sequence[RunRecord]) -> list[str]:
    """What differs, and what was given by hand."""
    given = [text.lstrip("+~").partition("=")[0] for record in records for text in record.overrides]
    known = {name for record in records for name in settings_of(record)}
    return list(dict.fromkeys([*differing(records), *(name for name in given if name in known)]))


def _chosen(record: RunRecord, settings: Sequence[str]) -> dict[str, str]:
    flat = settings_of(record)
    return {name: flat.get(name, "") for name in settings}


def _in_order(found: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for each in found for name in each))


def _worth_a_column(name: str, found: Sequence[Mapping[str, Any]]) -> bool:
    values = [each.get(name) for each in found]
    return name.startswith("ledger.accounts.") and any(values) and (len(values) == 1 or len(set(values)) > 1)


def _shown(name: str, value: float | int | None) -> str:
    if value is None:
        return ""
    if name.endswith("_s"):
        return f"{value:.3f}"
    if name.endswith("bytes") or name.startswith("ledger."):
        return format_size(int(value))
    return f"{value:,}"


def _cell(text: str) -> str:
    return one_line(text).replace("|", "\\|")
