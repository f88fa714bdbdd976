"""Parallel text in tables with named columns: CSV, JSON lines, Parquet, folders of ``datasets``."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import DataError
from ..text.arrow import read_batches

__all__ = ["is_table", "read_table", "table_files"]

_SUFFIXES = (".csv", ".jsonl", ".ndjson", ".json", ".parquet")
_ROWS = 5_000  # read at a time
_NESTED = "translation"  # the column in which ``datasets`` keeps a sentence by language


def is_table(path: Path) -> bool:
    """Whether a path is a file or folder with named columns, by its name and content."""
    if path.is_dir():
        return any((path / name).is_file() for name in ("state.json", "dataset_dict.json")) or any(
            path.glob("*.parquet")
        )
    return path.suffix.lower() in _SUFFIXES and path.is_file()


def table_files(path: Path) -> tuple[Path, ...]:
    """The files that hold the rows, in order.

    Raises:
        DataError: a folder holds several splits, or names files that are not there.
    """
    if not path.is_dir():
        return (path,)
    if (path / "dataset_dict.json").is_file():
        splits = _read_json(path / "dataset_dict.json").get("splits", [])
        names = ", ".join(str(path / name) for name in splits)
        raise DataError(f"{path} holds several splits; give one of {names}")
    if not (path / "state.json").is_file():
        return tuple(sorted(path.glob("*.parquet")))
    try:
        files = [
            path / entry["filename"] for entry in _read_json(path / "state.json")["_data_files"]
        ]
    except (KeyError, TypeError) as error:
        raise DataError(f"{path / 'state.json'}: lists no data files") from error
    for file in files:
        if not file.is_file():
            raise DataError(f"{file}: no such file, but {path / 'state.json'} lists it")
    return tuple(files)


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
    for number, row in enumerate(_rows(path), 1):
        if isinstance(row.get(_NESTED), Mapping):
            row = row[_NESTED]
        if chosen is None:
            chosen = _column(path, row, source), _column(path, row, target)
        yield _cell(path, number, row, chosen[0]), _cell(path, number, row, chosen[1])


def _column(path: Path, row: Mapping[str, Any], names: Sequence[str]) -> str:
    for name in names:
        if name in row:
            return name
    raise DataError(
        f"{path}: no column {' or '.join(names)}, only {', '.join(map(str, row))}; name it with "
        "--columns source=NAME,target=NAME"
    )


def _cell(path: Path, number: int, row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if value is None:
        return ""  # an empty side: dropped and counted
    if not isinstance(value, str):
        raise DataError(f"{path}: row {number}: {name} is not text but {value!r:.40}")
    return " ".join(value.splitlines()) if "\n" in value or "\r" in value else value


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    kind = path.suffix.lower()
    try:
        if kind == ".csv":
            yield from _csv_rows(path)
        elif kind == ".parquet":
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(_ROWS):
                    yield from batch.to_pylist()
        elif kind == ".arrow":
            for batch in read_batches(path, _ROWS):
                yield from batch.to_pylist()
        else:
            yield from _json_rows(path)
    except (OSError, pa.ArrowException, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error


def _csv_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        for row in reader:
            if None in row or None in row.values():
                raise DataError(
                    f"{path}:{reader.line_num}: not {len(reader.fieldnames or ())} columns, "
                    "as the first line has"
                )
            yield row


def _json_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}:{number}: not a JSON object on one line") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}:{number}: not a JSON object on one line")
            yield row


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    return found if isinstance(found, dict) else {}
