"""Tables as values, and as text with the columns aligned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One line: a name, what stands in the columns, and a remark after them."""

    name: str
    cells: tuple[str, ...]
    note: str = ""
    indent: int = 0


@dataclass(frozen=True)
class Table:
    """Rows under a header, whose first word heads the names."""

    header: tuple[str, ...]
    rows: tuple[Row, ...]


def render(table: Table) -> str:
    """The table as lines; names on the left, columns aligned on the right."""
    lines = [Row(table.header[0], table.header[1:]), *table.rows]
    names = ["  " * row.indent + one_line(row.name) for row in lines]
    name_width = max(map(len, names))
    widths = [max(len(row.cells[column]) for row in lines) for column in range(len(table.header) - 1)]
    return "\n".join(_line(name.ljust(name_width), row, widths) for name, row in zip(names, lines, strict=True))


def _line(name: str, row: Row, widths: Sequence[int]) -> str:
    cells = "".join(f"  {cell:>{width}}" for cell, width in zip(row.cells, widths, strict=True))
    return f"{name}{cells}  {one_line(row.note)}".rstrip()


def one_line(text: str) -> str:
    """`text` with every run of blanks and line breaks as one blank."""
    return " ".join(text.split())


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def percent(part: float | None, whole: float) -> str:
    return "-" if part is None or whole <= 0 else f"{100 * part / whole:.1f} %"
