"""Prepared documents: a folder of token ids in Arrow, with its tokenizer and a manifest.

``labo prepare-text`` writes it, training reads it. The splits are Arrow streams, mapped into memory
and seen as numpy arrays. ``datasets.Dataset.from_file`` reads them too: ``input_ids`` and, for
examples, ``labels`` are the columns that Hugging Face trainers take.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import NonNegativeInt, PositiveInt, model_validator

from ..errors import DataError, RequestError
from ..run.files import Document, read_json
from ..text.arrow import read_table
from ..text.folder import (
    SPLITS,
    Count,
    FolderManifest,
    Maker,
    PreparedFolder,
    load_tokenizer,
    read_manifest,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["IGNORED", "MAKER", "TASK", "DocumentSplit", "PreparedDocuments", "schema"]

TASK = "language_modeling"
MAKER = Maker("labo prepare-text", TASK)
IGNORED = -100  # the label of a token that is given, not learned

_ALWAYS_THERE = (
    *(f"{split}.arrow" for split in SPLITS),
    "frequencies.json",
    "tokenizer/tokenizer.json",
)

Tokens = npt.NDArray[np.int32]


def schema(kind: str, split: str) -> pa.Schema:
    """The columns of a split."""
    columns = [("input_ids", pa.list_(pa.int32()))]
    if kind != "text":
        columns.append(("labels", pa.list_(pa.int32())))
    columns.append(("bytes", pa.int64()))  # UTF-8 bytes of what is learned
    if split != "train":
        columns.append(("name", pa.string()))
    return pa.schema(columns)


class DocumentSplit:
    """Documents in token ids, mapped into memory.

    Attributes:
        lengths: (N,) tokens of each document.
        bytes: (N,) UTF-8 bytes of the learned text of each document.
    """

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self._tokens = _Lists(table["input_ids"])
        self._labels = _Lists(table["labels"]) if "labels" in table.column_names else None
        self.lengths = self._tokens.lengths
        self.bytes: npt.NDArray[np.int64] = table["bytes"].to_numpy()
        if self._labels and not np.array_equal(self._labels.lengths, self.lengths):
            raise DataError("a document has more labels than tokens, or fewer")

    def check(self, vocabulary: int) -> None:
        """Refuse ids without a type, and documents without a token.

        Raises:
            DataError: there is such an id or document.
        """
        if len(self) and self.lengths.min() < 1:
            raise DataError("a document has no token")
        if len(self) and self.bytes.min() < 0:
            raise DataError("a document has a negative number of bytes")
        for values in self._tokens.chunks:
            if len(values) and not 0 <= values.min() <= values.max() < vocabulary:
                raise DataError(f"a token id is outside [0, {vocabulary})")
        for values in self._labels.chunks if self._labels else ():
            wrong = (values != IGNORED) & ((values < 0) | (values >= vocabulary))
            if wrong.any():
                raise DataError(f"a label is neither in [0, {vocabulary}) nor {IGNORED}")

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def tokens(self, document: int, first: int = 0, count: int | None = None) -> Tokens:
        """So many ids of a document, from the first on; all of them by default."""
        return self._tokens.part(document, first, count)

    def labels(self, document: int, first: int = 0, count: int | None = None) -> Tokens:
        """The ids that are learned, IGNORED elsewhere. Of a text they are the ids themselves."""
        return (self._labels or self._tokens).part(document, first, count)

    @property
    def masked(self) -> bool:
        """Whether some tokens are given and not learned."""
        return self._labels is not None

    def name(self, index: int) -> str:
        """Where a document is from; not for the training split, which does not keep it."""
        name: str = self._table["name"][index].as_py()
        return name


class _Lists:
    """A column of lists, of which nothing is copied but the lengths."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self.chunks = [chunk.flatten().to_numpy() for chunk in column.chunks]
        chunks = [np.diff(chunk.offsets.to_numpy()) for chunk in column.chunks]
        self.lengths: npt.NDArray[np.int64] = np.concatenate([*chunks, []]).astype(np.int64)
        self._first_rows = np.cumsum([0, *map(len, chunks)])
        # Where each list begins among the values of its chunk.
        self._starts = np.concatenate([np.cumsum(chunk) - chunk for chunk in chunks] or [[]])
        self._starts = self._starts.astype(np.int64)

    def part(self, row: int, first: int, count: int | None) -> Tokens:
        chunk = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        start, length = int(self._starts[row]), int(self.lengths[row])
        stop = length if count is None else min(first + count, length)
        return self.chunks[chunk][start + first : start + stop]


class _TextManifest(FolderManifest):
    """What ``prepared.json`` must hold; it says more."""

    kind: Literal["text", "prompt", "chat"]
    begin: NonNegativeInt | None
    end: NonNegativeInt
    vocabulary: PositiveInt

    @model_validator(mode="after")
    def _consistent(self) -> _TextManifest:
        for name, token in (("begin", self.begin), ("end", self.end)):
            if token is not None and token >= self.vocabulary:
                raise ValueError(f"{name}: {token} is outside [0, {self.vocabulary})")
        return self


class _Frequencies(Document):
    tokens: list[Count]


class PreparedDocuments(PreparedFolder):
    """A prepared folder.

    Args:
        path: the folder.

    Attributes:
        path: the folder.
        manifest: the content of prepared.json.
        fingerprint: 64 hex digits, the same for the same content.
        kind: "text", "prompt" or "chat".
        begin: the token that begins a document, or None if documents of this kind have none.
        end: the token that ends a document.

    Raises:
        DataError: it is no such folder, or an unfinished or damaged one.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        checked = read_manifest(self.path, _TextManifest, MAKER, _ALWAYS_THERE)
        self.manifest: dict[str, Any] = checked.model_dump()
        self.fingerprint = checked.content_fingerprint
        self.kind: str = checked.kind
        self.begin, self.end = checked.begin, checked.end
        self._vocabulary = checked.vocabulary
        self._splits: dict[str, DocumentSplit] = {}

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return load_tokenizer(self.path / "tokenizer", self._vocabulary)

    def split(self, name: str) -> DocumentSplit:
        """The training, validation or test split: "train", "valid" or "test"."""
        if name in self._splits:
            return self._splits[name]
        path = self.path / f"{name}.arrow"
        table = read_table(path, schema(self.kind, name))
        try:
            split = DocumentSplit(table)
            split.check(self._vocabulary)
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
        return self._splits.setdefault(name, split)

    @cached_property
    def counts(self) -> list[int]:
        """How often each type occurs in the training split."""
        path = self.path / "frequencies.json"
        try:
            counts = read_json(path, _Frequencies).tokens
        except RequestError as error:
            raise DataError(str(error)) from error
        if len(counts) != self._vocabulary:
            raise DataError(f"{path}: {len(counts)} counts of types, not {self._vocabulary}")
        return counts

    def frequencies(self) -> npt.NDArray[np.int64]:
        """(V,) how often each type occurs in the training split."""
        return np.asarray(self.counts, dtype=np.int64)
