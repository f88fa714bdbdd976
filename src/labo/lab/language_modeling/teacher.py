"""The predictions of a language model for training documents, stored by ``labo teacher``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import RequestError
from ..text.pretrained_tokenizer import (
    pretrained_tokenizer,
    vocabulary_difference,
    vocabulary_digest,
)
from ..text.stored import Rows
from ..text.teacher import TrainingPredictions
from .model import LanguageModel, check_head, load_causal
from .packing import by_pieces
from .prepared import MAKER, PreparedDocuments
from .served import ServedPredictions


class DocumentPredictions(TrainingPredictions):
    """What a causal language model predicts for the tokens of documents."""

    maker = MAKER
    served = ServedPredictions
    model: LanguageModel

    def __init__(self, folder: Path, data: Path, block: int | None) -> None:
        documents, tokenizer = PreparedDocuments(data), pretrained_tokenizer(str(folder))
        self.take(documents, documents.tokenizer)
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

    def samples(self, first: int, last: int) -> Iterator[Rows]:
        def read(number: int, begin: int, length: int) -> tuple[Any, Any]:
            document = first + number
            labels = self.split.labels(document, begin + 1, length)
            return self.split.tokens(document, begin, length), labels

        lengths, none = self.split.lengths[first:last], np.empty((0, self.selection.top_k))
        for parts in by_pieces(self.model, lengths, self.block, read, self.most_probable):
            indices, log_p = zip(*parts or [(none, none)], strict=True)
            yield np.concatenate(indices), np.concatenate(log_p)


PREDICTIONS = DocumentPredictions
