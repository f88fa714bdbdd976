"""Parallel text in tables with named columns: CSV, JSON lines, Parquet, folders of ``datasets``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..text import records

__all__ = ["is_table", "read_table", "table_files"]

_NESTED = "translation"  # the column in which ``datasets`` keeps a sentence by language


def is_table(path: Path) -> bool:
    """Whether a path is a file or folder with named columns, by its name and content."""
    if path.is_dir():
        return records.is_table(path) or any(path.glob("*.parquet"))
    return (records.is_table(path) or path.suffix.lower() == ".json") and path.is_file()


def table_files(path: Path) -> tuple[Path, ...]:
    """The files that hold the rows, in order.

    Raises:
        DataError: a folder holds several splits, or names files that are not there.
    """
    if path.is_dir() and not records.is_table(path):
        return tuple(sorted(path.glob("*.parquet")))
    return tuple(records.table_files(path))


def read_table(
    path: Path, source: Sequence[str], target: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """The pairs of a file, a few at a time.

    Args:
        path: one of :func:`table_files`.
        source, target: names for the column of a side; the first that the file has is read. A
            column "translation" with a sentence by language is looked into.

    Raises:
        DataError: it cannot be read, has no such column, or holds something else than text.
    """
    chosen: tuple[str, str] | None = None
    for where, row in records.read_rows(path):
        if isinstance(row.get(_NESTED), Mapping):
            row = row[_NESTED]
        if chosen is None:
            chosen = _column(path, row, source), _column(path, row, target)
        yield _cell(where, row, chosen[0]), _cell(where, row, chosen[1])


def _column(path: Path, row: Mapping[str, Any], names: Sequence[str]) -> str:
    for name in names:
        if name in row:
            return name
    raise DataError(
        f"{path}: no column {' or '.join(names)}, only {', '.join(map(str, row))}; name it with "
        "--columns source=NAME,target=NAME"
    )


def _cell(where: str, row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if value is None:
        return ""  # an empty side: dropped and counted
    if not isinstance(value, str):
        raise DataError(f"{where}: {name} is not text but {value!r:.40}")
    return " ".join(value.splitlines()) if "\n" in value or "\r" in value else value
