"""Lines of text, and rows with named columns.

Rows are those of JSON lines, CSV, Parquet, Arrow, and folders saved by ``datasets``, which need not
be installed. All are read a few at a time, whatever the size of the file.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..compressed import DAMAGED, open_compressed
from ..errors import DataError

_LONGEST_LINE = 1 << 24  # bytes
_ROWS_AT_ONCE = 1000
_LARGEST_CELL = 1 << 25  # characters of a CSV cell
_STATE = "state.json"  # a folder saved by datasets has it
_SPLITS = "dataset_dict.json"  # one with a folder for each split has it
_JSON_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_CSV = (".csv", ".csv.gz")
_SUFFIXES = (*_JSON_LINES, *_CSV, ".parquet", ".arrow")

Row = dict[str, Any]


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file, compressed or not, without their ends, one at a time."""
    number = 0
    try:
        with open_compressed(path) as file:
            while line := file.readline(_LONGEST_LINE + 1):
                number += 1
                if len(line) > _LONGEST_LINE:
                    raise DataError(f"{path}:{number}: a line of more than {_LONGEST_LINE} bytes")
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                yield text.removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise DataError(f"{path}:{number}: byte {byte:#04x} is not UTF-8") from error
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except DAMAGED as error:
        raise DataError(f"{path}: truncated or damaged after line {number} ({error})") from error


def is_table(path: Path) -> bool:
    """Whether a file or folder holds rows with named columns, by its name or its state file."""
    if path.is_dir():
        return (path / _STATE).is_file() or (path / _SPLITS).is_file()
    return path.name.lower().endswith(_SUFFIXES)


def table_files(path: Path) -> list[Path]:
    """The files of a table: the file itself, or those of a folder saved by ``datasets``."""
    if not path.is_dir():
        return [path]
    if (path / _SPLITS).is_file():
        inside = ", ".join(str(child) for child in sorted(path.iterdir()) if child.is_dir())
        raise DataError(f"{path} holds several splits; give one of {inside}")
    try:
        state = json.loads((path / _STATE).read_text(encoding="utf-8"))
        names = [entry["filename"] for entry in state["_data_files"]]
        selected = state.get("_indices_files") or state.get("_indices_data_files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path / _STATE}: not written by datasets ({error!r})") from error
    if selected:
        raise DataError(f"{path}: a selection of rows; save it with a newer version of datasets")
    files = [path / Path(name).name for name in names]
    for file in files:
        if not os.path.isfile(file):  # a name of any length
            raise DataError(f"{file}: no such file, but {_STATE} names it")
    return files


def read_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """The rows of a table, each with where it stands ("file:line" or "file, row 3").

    A table is a path that :func:`is_table` knows, or a .json file with an object on each line.
    """
    for file in table_files(path):
        name = file.name.lower()
        if name.endswith((*_JSON_LINES, ".json")):
            yield from _json_lines(file)
        elif name.endswith(_CSV):
            yield from _csv(file)
        else:
            batches = _parquet(file) if name.endswith(".parquet") else _arrow(file)
            yield from _from_batches(file, batches)


def _json_lines(path: Path) -> Iterator[tuple[str, Row]]:
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise DataError(f'{where}: not a JSON object, as in {{"text": "..."}}')
        yield where, row


def _csv(path: Path) -> Iterator[tuple[str, Row]]:
    limit = csv.field_size_limit(_LARGEST_CELL)
    try:
        reader = csv.DictReader((line + "\n" for line in read_lines(path)), strict=True)
        for row in reader:
            where = f"{path}:{reader.line_num}"
            if None in row or None in row.values():
                raise DataError(f"{where}: not as many cells as the first line has names")
            yield where, row
    except csv.Error as error:
        raise DataError(f"{path}: not CSV ({error})") from error
    finally:
        csv.field_size_limit(limit)


def _parquet(path: Path) -> Iterator[pa.RecordBatch]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
            batch.validate(full=True)
            yield batch


def _arrow(path: Path) -> Iterator[pa.RecordBatch]:
    """Record batches of an Arrow file of either format."""
    with pa.OSFile(str(path)) as file:
        try:
            reader: Iterable[pa.RecordBatch] = pa.ipc.open_stream(file)
        except pa.ArrowInvalid:
            opened = pa.ipc.open_file(file)
            reader = (opened.get_batch(number) for number in range(opened.num_record_batches))
        for batch in reader:
            batch.validate(full=True)  # a damaged one can end the process
            for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                yield batch.slice(start, _ROWS_AT_ONCE)


def _from_batches(path: Path, batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[str, Row]]:
    number = 0
    try:
        for batch in batches:
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{path}: damaged after row {number} ({error})") from error
