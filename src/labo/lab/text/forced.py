"""Teacher-forced statistics: the prediction for each reference token, given the true prefix.

Logits are computed for one block of tokens at a time; the (tokens, V) logits are never stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...calibration import ReliabilityBins
from .batching import rounded
from .head import Head

_LOGITS_AT_ONCE = 1 << 24  # numbers


def token_statistics(
    head: Head, target: Tensor, temperature: float | None = None
) -> dict[str, Tensor]:
    """Of each token: NLL of the reference, entropy, top probability, and whether it is correct.

    A temperature adds ``tempered_nll`` and ``tempered_confidence``, those of ``softmax(logits /
    temperature)``.
    """
    parts = []
    for logits, labels in blocks(head, target):
        log_p = logits.log_softmax(-1)
        top, token = log_p.max(-1)
        columns = {
            "nll": -_of(log_p, labels),
            "entropy": -(log_p.exp() * log_p).sum(-1),
            "confidence": top.exp(),
            "right": (token == labels).float(),
        }
        if temperature is not None:
            tempered = (log_p / temperature).log_softmax(-1)
            columns["tempered_nll"] = -_of(tempered, labels)
            columns["tempered_confidence"] = tempered.amax(-1).exp()
        parts.append(columns)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def piece_statistics(
    head: Head, target: Tensor, lengths: Sequence[int], temperature: float | None
) -> list[dict[str, Tensor]]:
    """:func:`token_statistics` of pieces of so many tokens, on the CPU."""
    statistics = token_statistics(head, target, temperature)
    columns = [column.cpu().split(list(lengths)) for column in statistics.values()]
    return [dict(zip(statistics, row, strict=True)) for row in zip(*columns, strict=True)]


def log_probabilities(row: Mapping[str, Tensor], temperature: float) -> tuple[float, ...]:
    """Those of the reference tokens, from their statistics with this temperature."""
    return tuple((-row["nll" if temperature == 1 else "tempered_nll"]).tolist())


def mean_metrics(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Means of :func:`token_statistics` over all tokens of all sentences."""
    names = {
        "nll": "nll",
        "entropy": "entropy",
        "confidence": "confidence",
        "right": "token_accuracy",
        "tempered_nll": "calibrated_nll",
    }
    tokens = sum(len(row["nll"]) for row in rows)
    return {
        metric: math.fsum(float(row[name].double().sum()) for row in rows) / tokens
        for name, metric in names.items()
        if name in rows[0]
    }


def calibration_errors(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """The expected calibration error of all tokens, as trained and with the temperature."""
    columns = {"confidence": "ece", "tempered_confidence": "calibrated_ece"}
    right = torch.cat([row["right"] for row in rows])
    errors = {}
    for name, metric in columns.items():
        if name in rows[0]:
            # A probability may be rounded up to above 1.
            confidence = torch.cat([row[name] for row in rows]).clamp(max=1)
            errors[metric] = ReliabilityBins.of(confidence, right).expected_error
    return errors


def forced_record(
    tokens: Sequence[str], row: Mapping[str, Tensor], temperature: float | None
) -> dict[str, Any]:
    """The section ``forced`` of a record, from :func:`token_statistics` of the reference tokens."""
    record: dict[str, Any] = {
        "tokens": tokens,
        "probabilities": rounded((-row["nll"]).exp().tolist()),
        "confidence": rounded(row["confidence"].tolist()),
        "right": (row["right"] > 0).tolist(),
        "entropy": rounded(row["entropy"].tolist()),
    }
    if temperature is not None:
        record["tempered"] = {
            "temperature": temperature,
            "probabilities": rounded((-row["tempered_nll"]).exp().tolist()),
            "confidence": rounded(row["tempered_confidence"].tolist()),
        }
    return record


def rival_probabilities(head: Head, target: Tensor) -> Tensor:
    """(N,) the second largest probability at each token: large where two words compete."""
    return torch.cat(
        [logits.softmax(-1).topk(2).values[:, 1] for logits, _ in blocks(head, target)]
    )


def blocks(head: Head, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The logits (n, V) of a block of tokens at a time, and the tokens (n,)."""
    at_once = max(1, _LOGITS_AT_ONCE // len(head.weight))
    for states, labels in zip(head.states.split(at_once), target.split(at_once), strict=True):
        yield head.logits(states).float(), labels


def _of(log_p: Tensor, labels: Tensor) -> Tensor:
    return log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


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
