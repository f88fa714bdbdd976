"""The predictions of a language model for training documents, stored by ``labo teacher``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import RequestError
from ..text.pretrained_tokenizer import (
    pretrained_tokenizer,
    vocabulary_difference,
    vocabulary_digest,
)
from ..text.selection import Selection
from ..text.stored import Rows, StoredTeacher
from ..text.teacher import TrainingPredictions
from .model import LanguageModel, check_head, load_causal
from .packing import cut
from .prepared import IGNORED, MAKER, DocumentSplit, PreparedDocuments

__all__ = ["PREDICTIONS", "DocumentPredictions", "stored_rows"]

_TOKENS_AT_ONCE = 4096


class DocumentPredictions(TrainingPredictions):
    """What a causal language model predicts for the tokens of documents."""

    maker = MAKER
    model: LanguageModel

    def __init__(self, folder: Path, data: Path, block: int | None) -> None:
        documents, tokenizer = PreparedDocuments(data), pretrained_tokenizer(str(folder))
        self.fingerprint = documents.fingerprint
        self.vocabulary = vocabulary_digest(documents.tokenizer)
        if vocabulary_digest(tokenizer) != self.vocabulary:
            raise RequestError(
                f"{data} was not prepared with the tokenizer of {folder} "
                f"({vocabulary_difference(documents.tokenizer, tokenizer)}): "
                f"`labo prepare-text ... --tokenizer {folder}` does that"
            )
        self.types = len(tokenizer)
        self.model = LanguageModel(load_causal(folder)).eval()
        check_head(self.model)
        config = self.model.causal.config
        positions = getattr(config, "max_position_embeddings", None)
        block = block or positions
        if block is None or (positions is not None and block > positions):
            raise RequestError(f"--block: the model has {positions or 'no limit of'} positions")
        self.block = block
        self.split = documents.split("train")
        self.targets = np.maximum(self.split.lengths - 1, 0)
        self._filler = 0 if getattr(config, "pad_token_id", None) != 0 else 1

    @classmethod
    def served(cls, file: Path, data: Path, selection: Selection) -> Any:
        from .served import ServedPredictions

        return ServedPredictions(file, data, selection)

    def samples(self, first: int, last: int, top_k: int) -> Iterator[Rows]:
        columns = cut(self.split.lengths[first:last], self.block, whole=False)
        pieces = sorted(zip(*(c.tolist() for c in columns), strict=True), key=lambda x: x[2])
        found: list[list[tuple[int, Rows]]] = [[] for _ in range(first, last)]
        at_once = max(1, _TOKENS_AT_ONCE // self.block)
        for start in range(0, len(pieces), at_once):
            part = [(first + d, begin, length) for d, begin, length in pieces[start:][:at_once]]
            for (document, begin, _), rows in zip(part, self._pieces(part, top_k), strict=True):
                found[document - first].append((begin, rows))
        for parts in found:
            in_order = [rows for _, rows in sorted(parts, key=lambda part: part[0])]
            none = np.empty((0, top_k))
            indices, log_p = zip(*in_order, strict=True) if in_order else ((none,), (none,))
            yield np.concatenate(indices), np.concatenate(log_p)

    @torch.inference_mode()
    def _pieces(self, pieces: list[tuple[int, int, int]], top_k: int) -> list[Rows]:
        width = max(length for _, _, length in pieces)
        device = next(self.model.parameters()).device
        ids = torch.full((len(pieces), width), self._filler)
        target = torch.full((len(pieces), width), IGNORED)
        for row, (document, begin, length) in enumerate(pieces):
            ids[row, :length] = _tensor(self.split.tokens(document, begin, length))
            target[row, :length] = _tensor(self.split.labels(document, begin + 1, length))
        positions = torch.arange(width, device=device).expand(len(pieces), -1)
        return self.most_probable(self.model(ids.to(device), positions), target, top_k)


PREDICTIONS = DocumentPredictions


def _tensor(tokens: Any) -> Tensor:
    return torch.from_numpy(np.asarray(tokens, dtype=np.int64))


def stored_rows(
    stored: StoredTeacher, split: DocumentSplit, places: np.ndarray[Any, np.dtype[np.int64]]
) -> tuple[Tensor, Tensor]:
    """The stored predictions of targets: indices and log-probabilities, each (n, k).

    Args:
        stored: the predictions.
        split: the training documents.
        places: (n, 2), the document of each target, and the index of the token in it.
    """
    shape = (len(places), stored.top_k)
    indices, log_p = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.float32)
    changes = np.flatnonzero(np.diff(places[:, 0], prepend=-1, append=-1))
    for start, stop in pairwise(changes.tolist()):
        document = int(places[start, 0])
        number = places[start:stop, 1] - 1
        if split.masked:  # predictions are stored for the learned tokens only
            number = np.searchsorted(np.flatnonzero(split.labels(document)[1:] != IGNORED), number)
        found = stored.sample(document)
        indices[start:stop], log_p[start:stop] = (column[number] for column in found)
    return torch.from_numpy(indices), torch.from_numpy(log_p)
