"""``labo teacher --from FILE``: predictions that a server gave, checked and stored.

Each line of the file is the answer for one training document, in order, as the server gave it:

- vLLM, ``prompt_logprobs``: for every token a mapping from token id to log-probability;
- SGLang, ``input_token_logprobs`` and ``input_top_logprobs`` of ``meta_info``;
- OpenAI-style ``logprobs``: of completions (``echo``), by ``token_id:N`` or by text, and of chats
  (``content``), which has the generated tokens only.

A line has a position for every token of its document, or one for every token that is learned. The
token of each position must be that of the document: predictions that are shifted by one token look
like any others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import DataError, RequestError
from ..text.arrow import IGNORED
from ..text.stored import Rows
from ..text.teacher import ClassSelection, TrainingPredictions
from .prepared import MAKER, PreparedDocuments

_ROUNDING = 1e-4  # by which probabilities may sum to more than 1


class Position(NamedTuple):
    """What a server gave for a token: its id, its text if known, and the candidates by id."""

    token: int | None
    text: str | None
    candidates: Mapping[int, float]


class ServedPredictions(TrainingPredictions):
    """The predictions of a file of JSON lines for the training documents of a prepared folder."""

    maker = MAKER
    block = 0  # the server decides what the model sees

    def __init__(self, file: Path, data: Path, selection: ClassSelection) -> None:
        if not file.is_file():
            raise RequestError(f"--from: {file} is not a file")
        if selection.sampling == "random":
            raise RequestError(
                "--sampling random needs whole predictions: run the model itself, without --from"
            )
        documents = PreparedDocuments(data)
        self.file, self.selection = file, selection
        self.tokenizer = documents.tokenizer
        self.take(documents, self.tokenizer)
        self.types = len(self.tokenizer)
        self.split = documents.split("train")
        self.targets = np.maximum(self.split.lengths - 1, 0)
        self._lines = self._read()

    def _read(self) -> Iterator[tuple[int, str]]:
        with self.file.open(encoding="utf-8") as lines:
            yield from enumerate(lines)

    def samples(self, first: int, last: int) -> Iterator[Rows]:
        for document in range(first, last):
            # Lines before it were stored before an interruption.
            line = next((text for number, text in self._lines if number == document), None)
            if line is None:
                raise DataError(
                    f"{self.file}: ends after line {document}, but the data have "
                    f"{len(self.split)} training documents"
                )
            yield self._document(document, line)
        if last == len(self.split) and any(line.strip() for _, line in self._lines):
            raise DataError(
                f"{self.file}, line {last + 1}: the data have only {last} training documents"
            )

    def _document(self, document: int, line: str) -> Rows:
        place = f"{self.file}, line {document + 1}"
        tokens = self.split.tokens(document).tolist()
        labels = self.split.labels(document).tolist()
        learned = [at for at in range(1, len(tokens)) if labels[at] != IGNORED]
        positions = self._positions(place, line)
        if len(positions) == len(learned):  # of the learned tokens alone
            tokens, learned = [tokens[at] for at in learned], list(range(len(learned)))
        if len(positions) != len(tokens):
            raise DataError(
                f"{place}: {len(positions)} positions for a document of {len(tokens)} tokens, of "
                f"which {len(learned)} are learned. Send token ids, without a start token"
            )
        self._check_tokens(place, positions, tokens)
        shape = (len(learned), self.selection.top_k)
        indices, log_p = torch.empty(shape, dtype=torch.int32), torch.empty(shape)
        for row, at in enumerate(learned):
            entries = self._entries(f"{place}, position {at}", positions[at])
            indices[row], log_p[row] = map(torch.tensor, entries)
        indices, log_p = self.selection.nucleus(indices, log_p)
        return indices.numpy(), log_p.numpy()

    def _entries(self, place: str, position: Position) -> tuple[list[int], list[float]]:
        """The k most probable tokens of a position and their log-probabilities."""
        k, candidates = self.selection.top_k, position.candidates
        for token, value in candidates.items():
            if not 0 <= token < self.types:
                raise DataError(
                    f"{place}: token {token} is not in the tokenizer of the data, which has "
                    f"{self.types} types"
                )
            if not isinstance(value, int | float) or math.isnan(value) or value > _ROUNDING:
                raise DataError(f"{place}: token {token} has the log-probability {value}")
        if len(candidates) < k:
            raise DataError(
                f"{place}: {len(candidates)} candidates, fewer than --top-k {k}: ask the server "
                "for more, or store fewer"
            )
        best = sorted(candidates.items(), key=lambda item: (-item[1], item[0]))[:k]
        if sum(math.exp(value) for _, value in best) > 1 + _ROUNDING:
            raise DataError(f"{place}: the probabilities sum to more than 1")
        return [token for token, _ in best], [min(value, 0.0) for _, value in best]

    def _check_tokens(
        self, place: str, positions: Sequence[Position], tokens: Sequence[int]
    ) -> None:
        """Refuse the first position whose token is not that of the document."""
        for at, (given, expected) in enumerate(zip(positions, tokens, strict=True)):
            if given.token is None and at > 0 and expected not in given.candidates:
                raise DataError(
                    f"{place}, position {at}: the token {self._name(expected)} of the document is "
                    f"not among the candidates{_shift(positions, tokens)}"
                )
            if given.token is not None and given.token != expected:
                raise DataError(
                    f"{place}, position {at}: the file has the token {self._name(given.token)}, "
                    f"the document {self._name(expected)}{_shift(positions, tokens)}"
                )
            text = given.text
            if text and "\ufffd" not in text:
                own = self.tokenizer.decode([expected])
                if "\ufffd" not in own and text.strip() != own.strip():
                    raise DataError(
                        f"{place}, position {at}: token {expected} is {text!r} for the server and "
                        f"{own!r} for the tokenizer of the data: another tokenizer"
                    )

    def _name(self, token: int) -> str:
        known = 0 <= token < self.types
        return f"{token} {self.tokenizer.convert_ids_to_tokens(token)!r}" if known else str(token)

    # ------------------------------------------------------------------ formats

    def _positions(self, place: str, line: str) -> list[Position]:
        try:
            positions = self._find(place, json.loads(line))
        except json.JSONDecodeError as error:
            raise DataError(f"{place}: no JSON ({error.msg})") from error
        except (TypeError, KeyError, AttributeError, IndexError) as error:
            raise DataError(f"{place}: not as a server writes it ({error!r})") from error
        if positions is None:
            raise DataError(
                f"{place}: no log-probabilities: expected prompt_logprobs (vLLM), "
                "meta_info.input_top_logprobs (SGLang) or logprobs (OpenAI)"
            )
        return positions

    def _find(self, place: str, answer: Any) -> list[Position] | None:
        if "response" in answer and "body" in (answer["response"] or {}):  # of a batch
            answer = answer["response"]["body"]
        if answer.get("choices"):
            answer = answer["choices"][0]
        if answer.get("prompt_logprobs") is not None:
            return [_vllm(entry) for entry in answer["prompt_logprobs"]]
        about = answer.get("meta_info", answer)
        if about.get("input_top_logprobs") is not None:
            both = zip(about["input_token_logprobs"], about["input_top_logprobs"], strict=True)
            return [_sglang(*entry) for entry in both]
        about = answer.get("logprobs")
        if about is None:
            return None
        if about.get("content") is not None:
            return [
                self._chat(f"{place}, position {at}", x) for at, x in enumerate(about["content"])
            ]
        both = zip(about["tokens"], about["top_logprobs"], strict=True)
        return [self._echo(f"{place}, position {at}", *x) for at, x in enumerate(both)]

    def _chat(self, place: str, entry: Any) -> Position:
        candidates = {
            self._id(place, other["token"]): other["logprob"] for other in entry["top_logprobs"]
        }
        token = self._id(place, entry["token"])
        return Position(token, None, candidates | {token: entry["logprob"]})

    def _echo(self, place: str, token: str, top: Mapping[str, float] | None) -> Position:
        candidates = {self._id(place, text): value for text, value in (top or {}).items()}
        return Position(self._id(place, token), None, candidates)

    def _id(self, place: str, text: str) -> int:
        """The id of a token that a server names by ``token_id:N`` or by its text."""
        if text.startswith("token_id:"):
            return int(text.removeprefix("token_id:"))
        ids = self._by_text.get(text, [])
        if len(ids) != 1:
            raise DataError(
                f"{place}: {len(ids)} tokens of the tokenizer have the text {text!r}: let the "
                "server name ids (return_tokens_as_token_ids of vLLM)"
            )
        return ids[0]

    @cached_property
    def _by_text(self) -> dict[str, list[int]]:
        tokens: dict[str, list[int]] = {}
        for token in range(self.types):
            tokens.setdefault(self.tokenizer.decode([token]), []).append(token)
        return tokens


def _shift(positions: Sequence[Position], tokens: Sequence[int]) -> str:
    """A hint, if the file fits when it is moved by one token."""

    def fits(position: Position, token: int) -> bool:
        return token in position.candidates if position.token is None else position.token == token

    for moved, rest in ((positions[2:], tokens[1:]), (positions[1:], tokens[2:])):
        if moved and rest and all(map(fits, moved, rest)):
            return "; the file fits if it is moved by 1 token"
    return ""


def _vllm(entry: Any) -> Position:
    if entry is None:
        return Position(None, None, {})
    candidates = {
        int(token): value["logprob"] if isinstance(value, Mapping) else value
        for token, value in entry.items()
    }
    return Position(None, None, candidates)


def _sglang(own: Any, top: Any) -> Position:
    text = own[2] if len(own) > 2 else None
    candidates = {int(entry[1]): entry[0] for entry in top or ()}
    if own[0] is not None:
        candidates[int(own[1])] = own[0]
    return Position(int(own[1]), text, candidates)
