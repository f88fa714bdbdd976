"""Prepared parallel text: a folder of token ids in Arrow, with its tokenizers and a manifest.

``labo prepare`` writes it, training reads it. The splits are Arrow streams, mapped into memory and
seen as numpy arrays; ``datasets.Dataset.from_file`` reads them too. The manifest is written last,
so a folder that has one is whole.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import ValidationError

from ..errors import DataError
from ..text.arrow import flat_lists
from ..text.folder import MANIFEST, load_tokenizer, read_manifest
from .text import TextOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["Pair", "Prepared", "TextSplit", "schema"]

Side = Literal["source", "target"]


def schema(split: str) -> pa.Schema:
    """The columns of a split; those that are scored also hold their raw lines."""
    ids = [("source", pa.list_(pa.int32())), ("target", pa.list_(pa.int32())), ("pair", pa.int8())]
    texts = [("source_text", pa.string()), ("target_text", pa.string())]
    return pa.schema(ids if split == "train" else ids + texts)


@dataclass(frozen=True)
class Pair:
    """A direction of translation; the tag, if any, is the first token of each source."""

    source: str
    target: str
    tag: str | None = None

    def __str__(self) -> str:
        return f"{self.source}-{self.target}"


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
        """(N + 1,), where each source sentence begins."""
        return self._source[1]

    @property
    def target_values(self) -> npt.NDArray[np.int32]:
        """All target sentences, one after the other."""
        return self._target[0]

    @property
    def target_offsets(self) -> npt.NDArray[np.int64]:
        """(N + 1,), where each target sentence begins."""
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

    def source_text(self, index: int) -> str:
        """The raw line; not for the training split, which does not keep them."""
        text: str = self._table["source_text"][index].as_py()
        return text

    def target_text(self, index: int) -> str:
        """The raw line; not for the training split, which does not keep them."""
        text: str = self._table["target_text"][index].as_py()
        return text


class Prepared:
    """A prepared folder.

    Args:
        path: the folder.

    Attributes:
        path: the folder.
        manifest: the content of prepared.json.
        fingerprint: 64 hex digits, the same for the same content.
        pairs: the directions of translation.
        text: what was done to the text, and is to be done to text that is translated.

    Raises:
        DataError: it is no prepared folder, or an unfinished or damaged one.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.manifest: dict[str, Any] = read_manifest(self.path)
        if "task" in self.manifest:  # prepared for another one
            raise DataError(f"{self.path}: not parallel text made by `labo prepare`")
        try:
            self.fingerprint: str = self.manifest["fingerprint"]
            self.pairs = [Pair(**pair) for pair in self.manifest["pairs"]]
            self.text = TextOptions.model_validate(self.manifest["text"])
            files = list(self.manifest["sha256"])
        except (KeyError, TypeError, ValidationError) as error:
            raise DataError(f"{self.path / MANIFEST}: damaged ({error!r})") from error
        for file in files:
            if not (self.path / file).is_file():
                raise DataError(f"{self.path / file}: missing; run `labo prepare` again")

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Of the source, or of both."""
        return load_tokenizer(self.path / "tokenizer")

    @cached_property
    def target_tokenizer(self) -> PreTrainedTokenizerFast:
        """Of the target; the same object as ``tokenizer`` if the vocabulary is joint."""
        folder = self.path / "target_tokenizer"
        return load_tokenizer(folder) if folder.is_dir() else self.tokenizer

    def split(self, name: str) -> TextSplit:
        """The training, validation or test split: "train", "valid" or "test"."""
        path = self.path / f"{name}.arrow"
        try:
            with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
                table = stream.read_all()
        except (OSError, pa.ArrowInvalid) as error:
            raise DataError(f"{path}: cannot be read ({error})") from error
        if table.schema != schema(name):
            raise DataError(f"{path}: its columns are not those of a prepared split")
        return TextSplit(table)

    def frequencies(self, side: Side) -> npt.NDArray[np.int64]:
        """(V,), how often each type occurs in the training split; </s> and tags count too."""
        path = self.path / "frequencies.json"
        try:
            counts = json.loads(path.read_text(encoding="utf-8"))[side]
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{path}: cannot be read ({error})") from error
        return np.asarray(counts, dtype=np.int64)
