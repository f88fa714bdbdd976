"""Prepared parallel text: a folder of token ids in Arrow, with its tokenizers and a manifest.

``labo prepare`` writes it, training reads it. The splits are Arrow streams, mapped into memory and
used as numpy arrays; ``datasets.Dataset.from_file`` reads them too. The manifest is written last,
so a folder that has one is complete. It lists the checksum of every file, and all are verified
before anything is mapped: each file is hashed once and remembered, see
:mod:`labo.lab.run.checksums`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field, NonNegativeInt

from ..errors import DataError, RequestError
from ..run.files import Document, read_json
from ..text.arrow import flat_lists, read_table
from ..text.folder import (
    MANIFEST,
    SPLITS,
    Count,
    FolderManifest,
    Maker,
    PreparedFolder,
    load_tokenizer,
    read_manifest,
)
from ..text.pretrained_tokenizer import pretrained_tokenizer, vocabulary_size
from .text import TextOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["MAKER", "Frame", "Pair", "PairEntry", "Prepared", "TextSplit", "read_split", "schema"]

Side = Literal["source", "target"]

MAKER = Maker("labo prepare", None)
_ALWAYS_THERE = (
    *(f"{split}.arrow" for split in SPLITS),
    "frequencies.json",
)
_SOURCE, _TARGET = "tokenizer/tokenizer.json", "target_tokenizer/tokenizer.json"


def schema(split: str) -> pa.Schema:
    """The columns of a split; those that are scored also hold their raw lines."""
    ids = [("source", pa.list_(pa.int32())), ("target", pa.list_(pa.int32())), ("pair", pa.int8())]
    texts = [("source_text", pa.string()), ("target_text", pa.string())]
    return pa.schema(ids if split == "train" else ids + texts)


class Frame(Document):
    """What is put around the sentences of a pre-trained model, see :func:`frame_pairs`.

    Attributes:
        prefix: text before each source.
        before: ids before a source, such as that of its language.
        after: ids after a source: </s>, and what follows it.
        target_before: ids between the start token of the decoder and a target.
        target_after: ids after </s> of a target. mBART has the target language there.
    """

    prefix: str
    before: list[NonNegativeInt]
    after: list[NonNegativeInt]
    target_before: list[NonNegativeInt]
    target_after: list[NonNegativeInt]


@dataclass(frozen=True)
class Pair:
    """A direction of translation.

    Attributes:
        source, target: the languages.
        tag: the first token of each source, if any.
        frame: for the tokenizer of a pre-trained model. None: sources and targets end with </s>.
    """

    source: str
    target: str
    tag: str | None = None
    frame: Frame | None = None

    def __str__(self) -> str:
        return f"{self.source}-{self.target}"

    def entry(self) -> dict[str, Any]:
        """As JSON."""
        known = {"source": self.source, "target": self.target, "tag": self.tag}
        return known if self.frame is None else known | {"frame": self.frame.model_dump()}


class _Vocabulary(Document):
    kind: Literal["joint", "separate"]
    source: int = Field(ge=1)
    target: int = Field(ge=1)


class PairEntry(Document):
    """A :class:`Pair` in a JSON file."""

    source: str
    target: str
    tag: str | None = None
    frame: Frame | None = None

    def pair(self) -> Pair:
        return Pair(self.source, self.target, self.tag, self.frame)


class _PairManifest(FolderManifest):
    """What ``prepared.json`` must hold; it says more."""

    pairs: list[PairEntry] = Field(min_length=1)
    text: TextOptions
    vocabulary: _Vocabulary
    sizes: dict[str, NonNegativeInt]


class _Frequencies(Document):
    source: list[Count]
    target: list[Count]


class TextSplit:
    """Token ids of sentence pairs; sentence i of a side is values[offsets[i] : offsets[i + 1]].

    Attributes:
        pair: (N,) int8, which of the pairs of the data each sentence pair belongs to.
    """

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self.pair: npt.NDArray[np.int8] = table["pair"].to_numpy()

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @cached_property
    def _source(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        return flat_lists(self._table["source"])

    @cached_property
    def _target(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        return flat_lists(self._table["target"])

    @property
    def source_values(self) -> npt.NDArray[np.int32]:
        """All source sentences, one after the other."""
        return self._source[0]

    @property
    def source_offsets(self) -> npt.NDArray[np.int64]:
        """(N + 1,), the start of each source sentence in ``source_values``."""
        return self._source[1]

    @property
    def target_values(self) -> npt.NDArray[np.int32]:
        """All target sentences, one after the other."""
        return self._target[0]

    @property
    def target_offsets(self) -> npt.NDArray[np.int64]:
        """(N + 1,), the start of each target sentence in ``target_values``."""
        return self._target[1]

    def source(self, index: int) -> npt.NDArray[np.int32]:
        """The ids of a source sentence, tag and end included."""
        return self.source_values[self.source_offsets[index] : self.source_offsets[index + 1]]

    def target(self, index: int) -> npt.NDArray[np.int32]:
        """The ids of a target sentence, its end included."""
        return self.target_values[self.target_offsets[index] : self.target_offsets[index + 1]]

    def lengths(self, side: Side) -> npt.NDArray[np.int64]:
        """(N,), the number of ids of each sentence."""
        return np.diff(self.source_offsets if side == "source" else self.target_offsets)

    def longest(self, given: int = 0) -> npt.NDArray[np.int64]:
        """(N,), the number of ids of the longer side of each sentence pair.

        Args:
            given: tokens that the decoder is given before a target, besides its start token.
        """
        return np.maximum(self.lengths("source"), self.lengths("target") + given)

    def take(self, index: npt.NDArray[np.int64]) -> TextSplit:
        """Some of the sentence pairs."""
        return TextSplit(self._table.take(pa.array(index)))

    def source_text(self, index: int) -> str:
        """The raw line. The training split has none."""
        text: str = self._table["source_text"][index].as_py()
        return text

    def target_text(self, index: int) -> str:
        """The raw line. The training split has none."""
        text: str = self._table["target_text"][index].as_py()
        return text


class Prepared(PreparedFolder):
    """A prepared folder.

    Args:
        path: the folder.

    Attributes:
        path: the folder.
        manifest: the content of prepared.json.
        fingerprint: 64 hex digits, the same for the same content.
        pairs: the directions of translation.
        text: what was done to the text, and has to be done to text that is translated.
        pretrained: whether the tokenizers are those of a pre-trained model.

    Raises:
        DataError: it is no prepared folder, or an unfinished or damaged one.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        checked = read_manifest(self.path, _PairManifest, MAKER, _ALWAYS_THERE)
        self._vocabulary = checked.vocabulary
        self.manifest: dict[str, Any] = checked.model_dump()
        self.fingerprint = checked.content_fingerprint
        self.pairs = [entry.pair() for entry in checked.pairs]
        self.pretrained = any(pair.frame for pair in self.pairs)
        self.text = checked.text
        self._splits: dict[str, TextSplit] = {}
        needed = [] if self.pretrained else [_SOURCE]
        needed += [_TARGET] if self._vocabulary.kind == "separate" else []
        for name in needed:
            if name not in checked.sha256:
                raise DataError(f"{self.path / MANIFEST}: sha256 has no {name}")

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer of the source, or of both sides."""
        return self._load("tokenizer", self._vocabulary.source)

    @cached_property
    def target_tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer of the target; the same object as ``tokenizer`` for a joint vocabulary."""
        if self._vocabulary.kind == "joint":
            return self.tokenizer
        return self._load("target_tokenizer", self._vocabulary.target)

    def _load(self, name: str, size: int) -> PreTrainedTokenizerFast:
        if not self.pretrained:
            return load_tokenizer(self.path / name, size)
        tokenizer = pretrained_tokenizer(self.path / name, fast=False)
        if (found := vocabulary_size(tokenizer)) != size:
            raise DataError(f"{self.path / name}: {found} types, but {MANIFEST} says {size}")
        return tokenizer

    @property
    def pad(self) -> int:
        """The id that fills up rows."""
        return int(self.tokenizer.pad_token_id)

    @property
    def end(self) -> int:
        """The id that ends a target."""
        return int(self.target_tokenizer.eos_token_id)

    def split(self, name: str) -> TextSplit:
        """The training, validation or test split: "train", "valid" or "test"."""
        if name not in self._splits:
            split = read_split(self.path, name)
            self._check_ids(split, self.path / f"{name}.arrow")
            self._splits[name] = split
        return self._splits[name]

    def _check_ids(self, split: TextSplit, path: Path) -> None:
        """Refuse ids without a type, and sentence pairs without a language pair or a token."""
        for side, size in (
            ("source", self._vocabulary.source),
            ("target", self._vocabulary.target),
        ):
            values = split.source_values if side == "source" else split.target_values
            if len(values) and not 0 <= values.min() <= values.max() < size:
                raise DataError(f"{path}: a {side} token id is outside [0, {size})")
            if len(split) and split.lengths(side).min() < 1:  # type: ignore[arg-type]
                raise DataError(f"{path}: a {side} sentence has no token")
        if len(split) and not 0 <= split.pair.min() <= split.pair.max() < len(self.pairs):
            raise DataError(f"{path}: a language pair is outside [0, {len(self.pairs)})")

    @cached_property
    def counts(self) -> _Frequencies:
        """How often each type occurs in the training split."""
        try:
            return read_json(self.path / "frequencies.json", _Frequencies)
        except RequestError as error:
            raise DataError(str(error)) from error

    def frequencies(self, side: Side) -> npt.NDArray[np.int64]:
        """(V,), how often each type occurs in the training split; </s> and tags count too."""
        path = self.path / "frequencies.json"
        counts = self.counts.source if side == "source" else self.counts.target
        size = getattr(self._vocabulary, side)
        if len(counts) != size:
            raise DataError(f"{path}: {len(counts)} counts of {side} types, not {size}")
        return np.asarray(counts, dtype=np.int64)


def read_split(folder: Path, name: str) -> TextSplit:
    """A split of a prepared folder, mapped into memory.

    Raises:
        DataError: it is missing, damaged or has other columns.
    """
    return TextSplit(read_table(folder / f"{name}.arrow", schema(name)))
