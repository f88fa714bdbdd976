"""How probable given text is: ``labo score``.

:class:`Scorer` is the way in from Python. A document is scored as in training and evaluation: from
its begin token on, its end included, and from the beginning of each block if it is longer than the
model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from ..errors import RequestError, printable_on
from ..run.calibration import divisor_of
from ..tasks import find_model
from ..text.batching import rounded
from ..text.folder import load_tokenizer
from ..text.forced import token_statistics
from ..text.stdio import Answer, Notice, answer_lines
from .documents import Part, RawDocument, Unit, find_inputs, read_documents
from .model import LanguageModel, load_causal
from .packing import cut
from .prepared import IGNORED, TASK
from .tokenizers import chat_renderer, encode

__all__ = ["Score", "Scorer", "score_files", "score_stream", "write_scores"]

_DOCUMENTS_AT_ONCE = 200
_TOKENS_AT_ONCE = 4096


@dataclass(frozen=True)
class Score:
    """What a model gives the learned tokens of a document.

    Attributes:
        name: of the document.
        tokens: the learned tokens.
        log_probabilities: the natural logarithm of the probability of each; calibrated if the
            model is, see ``labo calibrate``.
        bytes: UTF-8 bytes of the learned text.
    """

    name: str
    tokens: tuple[str, ...]
    log_probabilities: tuple[float, ...]
    bytes: int

    @property
    def log_probability(self) -> float:
        return math.fsum(self.log_probabilities)

    def record(self, *, tokens: bool) -> dict[str, object]:
        """As a line of JSON; with each token if asked for."""
        found: dict[str, object] = {
            "name": self.name,
            "log_probability": self.log_probability,
            "tokens": len(self.tokens),
            "bytes": self.bytes,
            "bits_per_byte": -self.log_probability / math.log(2) / self.bytes,
        }
        if tokens:
            found["token"] = self.tokens
            found["token_log_probability"] = rounded(self.log_probabilities)
        return found


class Scorer:
    """A trained language model that scores documents.

    Args:
        run: a run directory, or a model folder itself.

    Example::

        Scorer("runs/lm-manual-labo-s0").score([RawDocument("", "text", (Part("A list", True),))])
    """

    def __init__(self, run: str | Path) -> None:
        folder, _ = find_model(run, TASK)
        self.temperature = divisor_of(folder)
        self.tokenizer = load_tokenizer(folder)
        self.model = LanguageModel(load_causal(folder)).eval()
        self.positions = int(self.model.causal.config.max_position_embeddings)
        if torch.accelerator.is_available():
            self.model.to(torch.accelerator.current_accelerator())

    def score(self, documents: Sequence[RawDocument]) -> list[Score]:
        """The score of each document.

        Raises:
            RequestError: a document has nothing to score.
        """
        encoded = list(encode(self.tokenizer, documents))
        found: list[list[tuple[int, torch.Tensor]]] = [[] for _ in documents]
        lengths = np.array([len(ids) for ids, _ in encoded])
        columns = (column.tolist() for column in cut(lengths, self.positions, whole=False))
        pieces = sorted(zip(*columns, strict=True), key=lambda piece: int(piece[2]))
        at_once = max(1, _TOKENS_AT_ONCE // self.positions)
        for start in range(0, len(pieces), at_once):
            part = pieces[start : start + at_once]
            for (document, first, _), values in zip(part, self._pieces(part, encoded), strict=True):
                found[document].append((first, values))
        scores = []
        for document, (_, labels), parts in zip(documents, encoded, found, strict=True):
            log_p = [x for _, column in sorted(parts, key=lambda v: v[0]) for x in column.tolist()]
            size = sum(len(part.text.encode()) for part in document.parts if part.learned)
            if not log_p or not size:
                raise RequestError(f"{document.name or 'a document'}: nothing to score in it")
            tokens = [label for label in labels[1:] if label != IGNORED]
            names = self.tokenizer.convert_ids_to_tokens(tokens)
            scores.append(Score(document.name, tuple(names), tuple(log_p), size))
        return scores

    @torch.inference_mode()
    def _pieces(
        self, pieces: Sequence[tuple[int, int, int]], encoded: Sequence[tuple[list[int], list[int]]]
    ) -> tuple[torch.Tensor, ...]:
        """The log-probabilities of the learned tokens of each piece."""
        width = max(length for _, _, length in pieces)
        device = next(self.model.parameters()).device
        pad = self.tokenizer.pad_token_id
        ids = torch.full((len(pieces), width), 0 if pad != 0 else 1)
        target = torch.full((len(pieces), width), IGNORED)
        for row, (document, first, length) in enumerate(pieces):
            tokens, labels = encoded[document]
            ids[row, :length] = torch.tensor(tokens[first : first + length])
            target[row, :length] = torch.tensor(labels[first + 1 : first + 1 + length])
        positions = torch.arange(width, device=device).expand(len(pieces), -1)
        learned = (target != IGNORED).to(device)
        head = self.model(ids.to(device), positions)
        head = head._replace(states=head.states[learned])
        found = token_statistics(head, target.to(device)[learned], self.temperature)
        nll = found["nll"] if self.temperature == 1 else found["tempered_nll"]
        return (-nll).cpu().split(learned.sum(-1).tolist())


def score_files(
    run: str | Path, names: Sequence[str], *, documents: Unit = "file", column: str = "text"
) -> Iterator[Score]:
    """The score of each document of files, tables and folders that prepare-text reads."""
    scorer = Scorer(run)
    render = chat_renderer(scorer.tokenizer)
    inputs = find_inputs(names)
    every = (d for path in inputs for d in read_documents(path, documents, column, render))
    while chunk := list(islice(every, _DOCUMENTS_AT_ONCE)):
        yield from scorer.score(chunk)


def score_stream(
    run: str | Path, source: BinaryIO, target: BinaryIO, *, tokens: bool = False
) -> None:
    """Score lines, each as a text; a line of JSON for each. An empty line gives ``null``."""

    def start(notice: Notice) -> Answer:
        scorer = Scorer(run)

        def answer(lines: Sequence[str], first: int, advance: object) -> str:
            named = [
                RawDocument(f"line {number}", "text", (Part(line, True),))
                for number, line in enumerate(lines, first)
            ]
            scores = iter(scorer.score([document for document in named if document.text]))
            return "".join(
                json.dumps(next(scores).record(tokens=tokens), ensure_ascii=False) + "\n"
                if document.text
                else "null\n"
                for document in named
            )

        return answer

    answer_lines(source, target, start)


def write_scores(scores: Iterable[Score], target: BinaryIO, *, tokens: bool = False) -> None:
    """A line of JSON for each score."""
    for score in scores:
        line = json.dumps(score.record(tokens=tokens), ensure_ascii=False) + "\n"
        target.write(printable_on(target, line).encode())
    target.flush()
