"""Prepared documents: a folder of token ids in Arrow, with its tokenizer and a manifest.

``labo prepare-text`` writes it, training reads it. The splits are Arrow streams, mapped into memory
and seen as numpy arrays. ``datasets.Dataset.from_file`` reads them too: ``input_ids`` and, for
examples, ``labels`` are the columns that Hugging Face trainers take.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import NonNegativeInt, PositiveInt

from ..errors import DataError
from ..text.arrow import IGNORED, Lists
from ..text.folder import FolderManifest, Maker, PreparedFolder, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TASK = "language_modeling"
MAKER = Maker("labo prepare-text", TASK)

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
    """Documents in token ids, mapped into memory: (N,) tokens of each, and UTF-8 bytes to learn."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self._tokens = Lists(table["input_ids"])
        self._labels = Lists(table["labels"]) if "labels" in table.column_names else None
        self.lengths = self._tokens.lengths
        self.bytes: npt.NDArray[np.int64] = table["bytes"].to_numpy()
        if self._labels and not np.array_equal(self._labels.lengths, self.lengths):
            raise DataError("a document has more labels than tokens, or fewer")

    def check(self, vocabulary: int) -> None:
        """Refuse ids without a type, and documents without a token."""
        if len(self) and self.lengths.min() < 1:
            raise DataError("a document has no token")
        if len(self) and self.bytes.min() < 0:
            raise DataError("a document has a negative number of bytes")
        self._tokens.check("token id", vocabulary)
        if self._labels:
            self._labels.check("label", vocabulary, ignored=IGNORED)

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


class _TextManifest(FolderManifest):
    """What ``prepared.json`` must hold; it says more."""

    kind: Literal["text", "prompt", "chat"]
    begin: NonNegativeInt | None
    end: NonNegativeInt
    vocabulary: PositiveInt


class PreparedDocuments(PreparedFolder[_TextManifest, DocumentSplit]):
    """Prepared documents, see :class:`labo.lab.text.folder.PreparedFolder`.

    ``begin`` and ``end`` are the tokens around a document; ``begin`` is None for a kind without
    one.
    """

    maker = MAKER
    Manifest = _TextManifest

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.kind: str = self.checked.kind
        self.begin, self.end = self.checked.begin, self.checked.end

    @property
    def types(self) -> dict[str, int]:
        return {"tokens": self.checked.vocabulary}

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return load_tokenizer(self.path / "tokenizer", self.types["tokens"])

    def schema(self, split: str) -> pa.Schema:
        return schema(self.kind, split)

    def read_split(self, table: pa.Table) -> DocumentSplit:
        split = DocumentSplit(table)
        split.check(self.types["tokens"])
        return split
