"""The probability of given text, as ``labo score`` writes it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from ..errors import printable_on
from .batching import rounded


@dataclass(frozen=True)
class TokenScore:
    """What a model gives the tokens of a text: calibrated if the model is, natural logarithms."""

    tokens: tuple[str, ...]
    log_probabilities: tuple[float, ...]

    @property
    def log_probability(self) -> float:
        return math.fsum(self.log_probabilities)

    def record(self, *, tokens: bool, **about: object) -> dict[str, object]:
        """As a line of JSON that begins with ``about``; with each token if asked for."""
        record = {
            **about,
            "log_probability": self.log_probability,
            "tokens": len(self.tokens),
            **self.further(),
        }
        if tokens:
            record["token"] = self.tokens
            record["token_log_probability"] = rounded(self.log_probabilities)
        return record

    def further(self) -> dict[str, object]:
        """Further entries of a record."""
        return {}


def json_line(record: Mapping[str, Any] | None) -> str:
    """A record as a line, without its end."""
    return json.dumps(record, ensure_ascii=False)


def write_records(records: Iterable[Mapping[str, Any]], target: BinaryIO) -> None:
    """A line of JSON for each record."""
    for record in records:
        target.write(printable_on(target, json_line(record) + "\n").encode())
    target.flush()
