"""One or more runs as a page of HTML that needs nothing else: no script, no other file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from orchestrator.records import RunRecord
from orchestrator.report import facts
from orchestrator.report.compare import comparison, differing
from orchestrator.report.layout import Row, Table, seconds
from orchestrator.report.text import closing_line, error_lines, headline, kv_lines, memory_table, stage_table
from orchestrator.units import format_size

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: .8rem 0 2rem; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .8rem; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child, td.note { text-align: left; }
td.part { padding-left: 2.4rem; opacity: .8; }
.bar { display: flex; height: 1.8rem; margin: .6rem 0; border: 1px solid #8886; overflow: hidden; }
.bar span { min-width: 1px; }
i.swatch { display: inline-block; width: .8em; height: .8em; margin-right: .5em; }
.failed { color: #c02020; font-weight: 600; white-space: pre-wrap; }
code { overflow-wrap: anywhere; }
""".strip()
_COLOURS = (
    *("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#44bb99"),
    *("#99ddff", "#bbcc33", "#775599", "#dd9988"),
)
_REST = "#8883"


def page(records: Sequence[RunRecord]) -> str:
    """A whole document; a comparison comes first where there are several runs."""
    sections = [_run(record) for record in records]
    if len(records) > 1:
        tables = "".join(_table(table) for table in comparison(records, differing(records)))
        sections.insert(0, f"<section><h1>{len(records)} runs</h1>{tables}</section>")
    title = escape(", ".join(record.run_id for record in records))
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{title}</title>\n'
        f"<style>\n{_STYLE}\n</style></head>\n<body>\n" + "\n".join(sections) + "\n</body>\n</html>\n"
    )


def _run(record: RunRecord) -> str:
    failed = "".join(f'<p class="failed">{escape(line)}</p>' for line in error_lines(record))
    notes = "".join(f"<p>{escape(line)}</p>" for line in (*kv_lines(record), *record.messages))
    return (
        f"<section><h2>{escape(headline(record))}</h2>{failed}\n<p><code>{escape(closing_line(record))}</code></p>\n"
        f"{_time(record)}\n{_memory(record)}\n{notes}</section>"
    )


def _time(record: RunRecord) -> str:
    ran = [each for each in facts.intervals(record) if each.wall_s is not None and each.beside is None]
    colours = _colours(each.name for each in ran)
    pieces = [(each.name, each.wall_s or 0.0, f"{seconds(each.wall_s)} s") for each in ran]
    return _bar(pieces, record.total_s, colours) + _table(stage_table(record), colours)


def _memory(record: RunRecord) -> str:
    ledger, table = record.ledger, memory_table(record)
    if ledger is None or table is None:
        return "<p>memory: not measured</p>"
    sizes = facts.accounts(record) | {
        "residual": ledger.residual_bytes,
        "unused": ledger.unused_bytes,
        "other processes": ledger.other_processes_bytes,
    }
    colours = _colours(name for name in sizes if name != "unused") | {"unused": _REST}
    pieces = [(name, float(size), format_size(size)) for name, size in sizes.items() if size]
    return _bar(pieces, ledger.total_bytes, colours) + _table(table, colours)


def _colours(names: Iterable[str]) -> dict[str, str]:
    return {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(dict.fromkeys(names))}


def _bar(pieces: Sequence[tuple[str, float, str]], whole: float, colours: Mapping[str, str]) -> str:
    """A bar as wide as `whole`; where the pieces are more than that, as wide as they are."""
    drawn = [piece for piece in pieces if piece[1] > 0]
    whole = max(whole, sum(size for _, size, _ in drawn))
    spans = "".join(
        f'<span style="width:{100 * size / whole:.3f}%;background:{colours[name]}" title="{escape(name)}: {shown}">'
        "</span>"
        for name, size, shown in drawn
    )
    return f'<div class="bar">{spans}</div>\n'


def _table(table: Table, colours: Mapping[str, str] | None = None) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in table.header)
    rows = "\n".join(_row(row, colours or {}) for row in table.rows)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table>\n"


def _row(row: Row, colours: Mapping[str, str]) -> str:
    colour = colours.get(row.name) if row.indent == 0 else None
    swatch = f'<i class="swatch" style="background:{colour}"></i>' if colour else ""
    opening = '<td class="part">' if row.indent else "<td>"
    cells = "".join(f"<td>{escape(cell)}</td>" for cell in row.cells)
    kind = "note failed" if row.note.startswith(("FAILED", "INTERRUPTED")) else "note"
    note = f'<td class="{kind}">{escape(row.note)}</td>' if row.note else ""
    return f"<tr>{opening}{swatch}{escape(row.name)}</td>{cells}{note}</tr>"
