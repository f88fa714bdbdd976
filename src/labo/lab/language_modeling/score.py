"""How probable given text is: ``labo score``.

:class:`Scorer` is the way in from Python. A document is scored as in training and evaluation: from
its begin token on, its end included, and from the beginning of each block if it is longer than the
model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from ..errors import RequestError
from ..text.arrow import IGNORED
from ..text.forced import TokenScore, log_probabilities, piece_statistics
from ..text.head import Head
from ..text.options import ScoreOptions, Unit
from ..text.stdio import answer_lines, json_line, write_records
from .documents import RawDocument, find_inputs, read_documents
from .model import SavedModel
from .packing import by_pieces
from .tokenizers import chat_renderer, encode

_DOCUMENTS_AT_ONCE = 200


@dataclass(frozen=True)
class Score(TokenScore):
    """What a model gives the learned tokens of a document; UTF-8 bytes of its learned text."""

    name: str
    bytes: int

    def further(self) -> dict[str, object]:
        rate = -self.log_probability / math.log(2) / self.bytes
        return {"bytes": self.bytes, "bits_per_byte": rate}


class Scorer(SavedModel):
    """A trained language model that scores documents.

    Args:
        run: a run directory, or a model folder itself.

    Example::

        Scorer("runs/lm-manual-labo-s0").score([RawDocument.of_text("", "A list")])
    """

    def score(self, documents: Sequence[RawDocument]) -> list[Score]:
        """The score of each document.

        Raises:
            RequestError: a document has nothing to score.
        """
        encoded = list(encode(self.tokenizer, documents))

        def read(document: int, first: int, length: int) -> tuple[list[int], list[int]]:
            tokens, labels = encoded[document]
            return tokens[first : first + length], labels[first + 1 : first + 1 + length]

        lengths = np.array([len(ids) for ids, _ in encoded])
        every = by_pieces(self.model, lengths, self.positions, read, self._log_probabilities)
        scores = []
        for document, (_, labels), parts in zip(documents, encoded, every, strict=True):
            log_p, size = tuple(chain.from_iterable(parts)), document.learned_bytes
            if not log_p or not size:
                raise RequestError(f"{document.name or 'a document'}: nothing to score in it")
            tokens = [label for label in labels[1:] if label != IGNORED]
            names = self.tokenizer.convert_ids_to_tokens(tokens)
            scores.append(Score(tuple(names), log_p, document.name, size))
        return scores

    def score_files(
        self, names: Sequence[str], *, documents: Unit = "file", column: str = "text"
    ) -> Iterator[Score]:
        """The score of each document of files, tables and folders that prepare-text reads."""
        render = chat_renderer(self.tokenizer)
        inputs = find_inputs(names)
        every = (d for path in inputs for d in read_documents(path, documents, column, render))
        while chunk := list(islice(every, _DOCUMENTS_AT_ONCE)):
            yield from self.score(chunk)

    def _log_probabilities(self, head: Head, target: torch.Tensor) -> list[tuple[float, ...]]:
        """Those of the learned tokens of each row."""
        learned = target != IGNORED
        lengths = learned.sum(-1).tolist()
        rows = piece_statistics(head.at(learned), target[learned], lengths, self.divisor)
        return [log_probabilities(row, self.divisor) for row in rows]


def score_command(
    run: Path, files: Sequence[str], options: ScoreOptions, source: BinaryIO, target: BinaryIO
) -> None:
    """``labo score``: the documents of files, or the lines of ``source`` if there are none.

    Each line is a text. An empty one gives ``null``.
    """
    if options.pair is not None:
        raise RequestError("--pair is for translation models")
    scorer, tokens = Scorer(run), options.tokens
    if files:
        scores = scorer.score_files(files, documents=options.documents, column=options.column)
        write_records((s.record(name=s.name, tokens=tokens) for s in scores), target)
        return

    def answer(lines: Sequence[str], first: int, advance: object) -> Iterator[str]:
        documents = [
            RawDocument.of_text(f"line {number}", line) for number, line in enumerate(lines, first)
        ]
        scores = iter(scorer.score([document for document in documents if document.text]))
        for document in documents:
            score = next(scores) if document.text else None
            yield json_line(score.record(name=score.name, tokens=tokens) if score else None)

    answer_lines(source, target, answer)
