"""Arrow streams that are written and read a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import DataError

IGNORED = -100  # the label of a token that is given, not learned
_BATCH = 100_000  # rows in a record batch
_BATCH_BYTES = 1 << 26  # bytes in a record batch


class ArrowFile:
    """A stream of record batches, written as rows come."""

    def __init__(self, path: Path, columns: pa.Schema) -> None:
        self.rows = 0
        self._schema = columns
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = 0
        self._waiting_bytes = 0
        self._file = pa.OSFile(str(path), "wb")
        self._stream = pa.ipc.new_stream(self._file, columns)

    def add(self, columns: Iterable[Any]) -> None:
        """Append rows, column by column; columns beyond those of the file are left out."""
        arrays = [
            column if isinstance(column, pa.Array) else pa.array(column, kind)
            for column, kind in zip(columns, self._schema.types, strict=False)
        ]
        if arrays:
            self._waiting.append(pa.record_batch(arrays, schema=self._schema))
            self._waiting_rows += self._waiting[-1].num_rows
            self._waiting_bytes += self._waiting[-1].nbytes
            self.rows += self._waiting[-1].num_rows
        if self._waiting_rows >= _BATCH or self._waiting_bytes >= _BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._waiting_rows:
            self._stream.write_batch(pa.concat_batches(self._waiting))
        self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0

    def __enter__(self) -> ArrowFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._flush()
            self._stream.close()
        self._file.close()


def read_batches(path: Path, size: int) -> Iterator[pa.RecordBatch]:
    """The content of an Arrow stream, a few rows at a time."""
    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
        for batch in stream:
            for start in range(0, batch.num_rows, size):
                yield batch.slice(start, size)


def read_table(path: Path, columns: pa.Schema) -> pa.Table:
    """A prepared split, mapped into memory; refused if it is damaged or has other columns."""
    try:
        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
            table = stream.read_all()
        # First: the name of a damaged column may not be text.
        if table.schema != columns:
            raise DataError(f"{path}: its columns are not those of a prepared split")
        table.validate(full=True)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    if any(column.null_count for column in table.columns):
        raise DataError(f"{path}: it has empty cells")
    return table


class Lists:
    """A column of lists of token ids, of which nothing is copied but the lengths."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self.chunks = [chunk.flatten().to_numpy() for chunk in column.chunks]
        chunks = [np.diff(chunk.offsets.to_numpy()) for chunk in column.chunks]
        self.lengths: npt.NDArray[np.int64] = np.concatenate([*chunks, []]).astype(np.int64)
        self._first_rows = np.cumsum([0, *map(len, chunks)])
        # Where each list begins among the values of its chunk.
        self._starts = np.concatenate([np.cumsum(chunk) - chunk for chunk in chunks] or [[]])
        self._starts = self._starts.astype(np.int64)

    def part(self, row: int, first: int = 0, count: int | None = None) -> npt.NDArray[np.int32]:
        """So many values of a list, from the first on; all of them by default."""
        chunk = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        start, length = int(self._starts[row]), int(self.lengths[row])
        stop = length if count is None else min(first + count, length)
        return self.chunks[chunk][start + first : start + stop]

    def check(self, what: str, types: int, *, ignored: int | None = None) -> None:
        """Refuse values outside [0, types), other than ``ignored``; ``what`` names them."""
        for values in self.chunks:
            wrong = (values < 0) | (values >= types)
            if ignored is not None:
                wrong &= values != ignored
            if wrong.any():
                further = "" if ignored is None else f", and not {ignored}"
                raise DataError(f"a {what} is outside [0, {types}){further}")
