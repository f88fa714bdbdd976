"""Prepared parallel text: a folder of token ids in Arrow, with its tokenizers and a manifest.

``labo prepare`` writes it, training reads it. The splits are Arrow streams, mapped into memory and
used as numpy arrays; ``datasets.Dataset.from_file`` reads them too.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field, NonNegativeInt
from pydantic.dataclasses import dataclass

from ..errors import DataError
from ..run.files import Document
from ..text.arrow import Lists
from ..text.folder import MANIFEST, FolderManifest, Maker, PreparedFolder, load_tokenizer
from ..text.pretrained_tokenizer import pretrained_tokenizer, vocabulary_size
from .text import TextOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Side = Literal["source", "target"]

MAKER = Maker("labo prepare", None)


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
    """A direction of translation, with the first token of each source, if any.

    Without a frame, which pre-trained models have, sources and targets end with </s>.
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


class _PairManifest(FolderManifest):
    """What ``prepared.json`` must hold; it says more."""

    pairs: list[Pair] = Field(min_length=1)
    text: TextOptions
    vocabulary: _Vocabulary
    sizes: dict[str, NonNegativeInt]


class TextSplit:
    """Token ids of sentence pairs; ``pair`` (N,) says which pair of languages each is of."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self.pair: npt.NDArray[np.int8] = table["pair"].to_numpy()
        self.sides: dict[Side, Lists] = {
            "source": Lists(table["source"]),
            "target": Lists(table["target"]),
        }

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def source(self, index: int) -> npt.NDArray[np.int32]:
        """The ids of a source sentence, tag and end included."""
        return self.sides["source"].part(index)

    def target(self, index: int) -> npt.NDArray[np.int32]:
        """The ids of a target sentence, its end included."""
        return self.sides["target"].part(index)

    def lengths(self, side: Side) -> npt.NDArray[np.int64]:
        """(N,), the number of ids of each sentence."""
        return self.sides[side].lengths

    def longest(self, given: int = 0) -> npt.NDArray[np.int64]:
        """(N,), the ids of the longer side; the decoder is given so many besides its start."""
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


class Prepared(PreparedFolder[_PairManifest, TextSplit]):
    """Prepared parallel text, see :class:`labo.lab.text.folder.PreparedFolder`.

    Attributes:
        text: what was done to the text, and has to be done to text that is translated.
        pretrained: whether the tokenizers are those of a pre-trained model.
        joint: whether source and target have one vocabulary.
    """

    maker = MAKER
    Manifest = _PairManifest

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.pairs = self.checked.pairs
        self.pretrained = any(pair.frame for pair in self.pairs)
        self.text = self.checked.text
        self.joint = self.checked.vocabulary.kind == "joint"

    @property
    def types(self) -> dict[str, int]:
        vocabulary = self.checked.vocabulary
        return {"source": vocabulary.source, "target": vocabulary.target}

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer of the source, or of both sides."""
        return self._load("tokenizer", self.types["source"])

    @cached_property
    def target_tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer of the target; the same object as ``tokenizer`` for a joint vocabulary."""
        if self.joint:
            return self.tokenizer
        return self._load("target_tokenizer", self.types["target"])

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

    def schema(self, split: str) -> pa.Schema:
        return schema(split)

    def read_split(self, table: pa.Table) -> TextSplit:
        split = TextSplit(table)
        for side, lists in split.sides.items():
            lists.check(f"{side} token id", self.types[side])
            if len(split) and lists.lengths.min() < 1:
                raise DataError(f"a {side} sentence has no token")
        if len(split) and not 0 <= split.pair.min() <= split.pair.max() < len(self.pairs):
            raise DataError(f"a language pair is outside [0, {len(self.pairs)})")
        return split
