"""Tables for the terminal. Owns: their look. Does not: compute numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table


def show_rows(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows of values under column names; numbers to the right."""
    table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for index, column in enumerate(columns):
        is_number = all(isinstance(row[index], (int, float)) for row in rows)
        table.add_column(column, justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*map(_text, row))
    console.print(table)


def show_facts(console: Console, title: str, facts: Mapping[str, object]) -> None:
    """Print names with their values, one pair a line."""
    table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    for name, value in facts.items():
        table.add_row(name, _text(value))
    console.print(table)


def _text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 1 else f"{value:,.1f}"
