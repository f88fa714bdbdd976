"""Tables of results, written as Markdown, LaTeX, CSV or JSON.

Markdown and LaTeX are for people: numbers are rounded, a mean has its standard deviation, and the
paper's number is in brackets. CSV and JSON are for programs: no number is rounded or scaled.
"""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from .run import files as atomic

NOTHING = "-"  # a cell without a number


@dataclass(frozen=True)
class Cell:
    """A number of a table."""

    value: float | None = None  # the number; None if there is none
    spread: float | None = None  # its standard deviation
    paper: Cell | None = None  # the paper's number in this cell
    interval: tuple[float, float] | None = None  # its confidence interval


@dataclass(frozen=True)
class Column:
    """A column of a table, and how its numbers are shown."""

    key: str  # its name in CSV and JSON
    heading: str  # its name in Markdown and LaTeX
    group: str = ""  # a heading above those of all neighbouring columns of the same group
    digits: int = 2  # decimal places in Markdown and LaTeX
    scale: float = 1.0  # the factor of the numbers in Markdown and LaTeX; 100 for percent
    suffix: str = ""  # printed after each number
    signed: bool = False  # whether positive numbers have a plus sign
    # Whether the column is in Markdown and LaTeX. CSV and JSON have all columns
    printed: bool = True
    # 1 if a larger number is better, -1 if a smaller one is, 0 if neither. The report marks the
    # best number
    better: int = 0

    def shown(self, number: float) -> str:
        """A number as text.

        Example:
            >>> Column("accuracy", "accuracy %", scale=100).shown(0.98765)
            '98.77'
        """
        sign = "+" if self.signed else ""
        return f"{number * self.scale:{sign}.{self.digits}f}{self.suffix}"


@dataclass(frozen=True)
class Row:
    """A row of a table: its label, and its cells by the key of their column."""

    label: str
    cells: Mapping[str, Cell]
    ruled: bool = False  # whether there is a rule above it

    def cell(self, key: str) -> Cell:
        return self.cells.get(key, Cell())


@dataclass(frozen=True)
class Table:
    """Rows and columns with a caption and notes."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    corner: str = "method"  # the heading of the labels
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def printed(self) -> list[Column]:
        return [column for column in self.columns if column.printed]


def best_rows(column: Column, rows: Sequence[Row]) -> set[int]:
    """The indices of the rows with the best number of a column, as far as its digits tell.

    It is empty if the column has no better direction, or fewer than two numbers.

    Example:
        >>> rows = [Row("a", {"s": Cell(0.912)}), Row("b", {"s": Cell(0.914)})]
        >>> best_rows(Column("s", "S", digits=3, better=1), rows)
        {1}
        >>> best_rows(Column("s", "S", digits=2, better=1), rows)
        {0, 1}
    """
    values = {i: row.cell(column.key).value for i, row in enumerate(rows) if not row.ruled}
    known = {i: value for i, value in values.items() if value is not None}
    if not column.better or len(known) < 2:
        return set()
    best = column.shown(max(known.values(), key=lambda value: column.better * value))
    return {i for i, value in known.items() if column.shown(value) == best}


def filled(columns: Iterable[Column], rows: Sequence[Row]) -> list[Column]:
    """The columns that have a number in some row.

    Example:
        >>> rows = [Row("ls", {"a": Cell(1.0)})]
        >>> [column.key for column in filled([Column("a", "A"), Column("b", "B")], rows)]
        ['a']
    """
    return [c for c in columns if any(row.cell(c.key).value is not None for row in rows)]


def shown_cell(column: Column, cell: Cell) -> str:
    """A cell as text, without the paper's number.

    Example:
        >>> shown_cell(Column("a", "A", signed=True), Cell(0.5, interval=(0.1, 0.9)))
        '+0.50 (+0.10, +0.90)'
    """
    if cell.value is None:
        return NOTHING
    text = column.shown(cell.value)
    if cell.spread is not None:
        text += f" ± {cell.spread * column.scale:.{column.digits}f}"
    if cell.interval is not None:
        text += f" ({', '.join(map(column.shown, cell.interval))})"
    return text


# ------------------------------------------------------------------ for people


def to_markdown(table: Table) -> str:
    """A Markdown table with the caption above and the notes below, columns aligned."""
    lines = [[text.replace("|", "\\|") for text in line] for line in _grid(table)]
    # A column is at least two characters wide: a dash and the colon that aligns it.
    widths = [max(2, *map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    text = "\n".join(f"| {' | '.join(line)} |" for line in (padded[0], rule, *padded[1:]))
    notes = "".join(f"\n- {note}" for note in table.notes)
    return f"{table.caption}\n\n{text}\n" + (f"{notes}\n" if notes else "")


def to_terminal(table: Table, width: int) -> str:
    """The table with lines that are no longer than the terminal is wide.

    Columns that do not fit beside each other continue in a further block, with the labels again.
    """
    grid = _grid(table)
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    blocks: list[list[int]] = [[]]
    for index in range(1, len(widths)):
        used = widths[0] + sum(2 + widths[i] for i in blocks[-1])
        if blocks[-1] and used + 2 + widths[index] > width:
            blocks.append([])
        blocks[-1].append(index)
    parts = ["\n".join(textwrap.wrap(table.caption, width))]
    for block in blocks:
        lines = (
            "  ".join([line[0].ljust(widths[0]), *(line[i].rjust(widths[i]) for i in block)])
            for line in grid
        )
        parts += ["\n".join(lines)]
    notes = [
        textwrap.fill(note, width, initial_indent="- ", subsequent_indent="  ")
        for note in table.notes
    ]
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])]) + "\n"


def to_latex(table: Table) -> str:
    """A ``table`` environment for booktabs."""
    columns = table.printed
    lines = [
        r"\begin{table}",
        r"\centering\small",
        rf"\caption{{{_escaped(table.caption)}}}",
        rf"\begin{{tabular}}{{l{'r' * len(columns)}}}",
        r"\toprule",
    ]
    if any(column.group for column in columns):
        cells, rules, at = [""], [], 2
        for group, members in groupby(columns, lambda column: column.group):
            span = len(list(members))
            cells.append(rf"\multicolumn{{{span}}}{{c}}{{{_escaped(group)}}}")
            if group:
                rules.append(rf"\cmidrule(lr){{{at}-{at + span - 1}}}")
            at += span
        lines += [" & ".join(cells) + r" \\", " ".join(rules)]
    headings = [_escaped(column.heading) for column in columns]
    lines += [" & ".join([_escaped(table.corner), *headings]) + r" \\", r"\midrule"]
    for row in table.rows:
        if row.ruled:
            lines.append(r"\midrule")
        lines.append(" & ".join([_escaped(row.label), *_texts(table, row, _tex)]) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += [rf"\par\footnotesize {_escaped(note)}" for note in table.notes]
    return "\n".join([*lines, r"\end{table}"]) + "\n"


def _grid(table: Table) -> list[list[str]]:
    """The headings and the rows as text, each with its label first."""
    head = [table.corner, *map(_full_heading, table.printed)]
    return [head, *([row.label, *_texts(table, row, shown_cell)] for row in table.rows)]


def _texts(table: Table, row: Row, shown: Callable[[Column, Cell], str]) -> Iterator[str]:
    for column in table.printed:
        cell = row.cell(column.key)
        text = shown(column, cell)
        yield f"{text} [{shown(column, cell.paper)}]" if cell.paper is not None else text


def _tex(column: Column, cell: Cell) -> str:
    if cell.value is None:
        return NOTHING
    value, *spread = shown_cell(column, cell).split(" ± ")
    small = rf"{{\tiny $\pm$ {spread[0]}}}" if spread else ""
    return _escaped(value) + small


def _full_heading(column: Column) -> str:
    return f"{column.group} {column.heading}".strip()


_TEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "Δ": r"$\Delta$",
    **{character: "\\" + character for character in "&%$#_{}"},
}


def _escaped(text: str) -> str:
    r"""Plain text for LaTeX.

    Example:
        >>> print(_escaped("tf_reg & 5 %"))
        tf\_reg \& 5 \%
    """
    return "".join(_TEX.get(character, character) for character in text)


# ------------------------------------------------------------------ for programs


def to_csv(table: Table) -> str:
    """One line per row: columns ``KEY``, and ``KEY_std``, ``KEY_paper`` and so on if not empty."""
    wanted = [
        (column.key, part)
        for column in table.columns
        for part in _PARTS
        if part == "" or any(_part(row, column.key, part) is not None for row in table.rows)
    ]
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    writer.writerow([table.corner, *(key + part for key, part in wanted)])
    for row in table.rows:
        writer.writerow([row.label, *(_part(row, key, part) for key, part in wanted)])
    return output.getvalue()


_PARTS: dict[str, Callable[[Cell], float | None]] = {
    "": lambda cell: cell.value,
    "_std": lambda cell: cell.spread,
    "_low": lambda cell: None if cell.interval is None else cell.interval[0],
    "_high": lambda cell: None if cell.interval is None else cell.interval[1],
    "_paper": lambda cell: None if cell.paper is None else cell.paper.value,
    "_paper_std": lambda cell: None if cell.paper is None else cell.paper.spread,
}


def _part(row: Row, key: str, part: str) -> float | None:
    return _PARTS[part](row.cell(key))


def to_json(table: Table) -> dict[str, Any]:
    """The table as a document: a list of rows, each with its cells by column."""
    keys = [column.key for column in table.columns]
    return {
        "caption": table.caption,
        "notes": list(table.notes),
        "columns": [{"key": c.key, "heading": _full_heading(c)} for c in table.columns],
        "rows": [
            {table.corner: row.label, "cells": {key: _cell(row.cell(key)) for key in keys}}
            for row in table.rows
        ],
    }


def _cell(cell: Cell) -> dict[str, Any]:
    document: dict[str, Any] = {"value": cell.value}
    if cell.spread is not None:
        document["std"] = cell.spread
    if cell.interval is not None:
        document["interval"] = list(cell.interval)
    if cell.paper is not None:
        document["paper"] = _cell(cell.paper)
    return document


def write_table(table: Table, stem: Path) -> None:
    """``STEM.md``, ``.tex``, ``.csv`` and ``.json``."""
    atomic.write_text(stem.with_suffix(".md"), to_markdown(table))
    atomic.write_text(stem.with_suffix(".tex"), to_latex(table))
    atomic.write_text(stem.with_suffix(".csv"), to_csv(table))
    atomic.write_json(stem.with_suffix(".json"), to_json(table))
