r"""Sentences of frequent and of rare words: BLEU (Table 4) and chosen probabilities (Figure 2).

.. math:: F(x) = \frac1N \sum_i f(x_i)

with f(x_i) the count of a source token in the training corpus. The sentences are sorted by
descending F and cut into three parts: most, medium and least. The paper cuts slices of 2400, which
leaves 83 sentences of its validation set out and makes the last part of its test set 450 sentences
short. The default here is equal thirds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..analysis.reading import Floats, Integers
from .bleu import bleu_metric

PARTS = ("most", "medium", "least")
BINS = 20


def frequency_parts(scores: Floats, size: int | None = None) -> dict[str, Integers]:
    """The indices of the most, medium and least frequent sentences by their scores F(x), (N,).

    They are equal thirds, or slices of ``size`` sentences as in the paper (2400): the remaining
    ones are dropped, and the last part may be short. Ties keep their order.

    Example:
        >>> frequency_parts(np.array([5.0, 9.0, 7.0, 1.0, 9.0]))
        {'most': array([1, 4]), 'medium': array([2, 0]), 'least': array([3])}
    """
    order = np.argsort(-scores, kind="stable")
    if size is None:
        cut = np.array_split(order, len(PARTS))
    else:
        cut = [order[size * part : size * (part + 1)] for part in range(len(PARTS))]
    return dict(zip(PARTS, cut, strict=True))


def bleu_by_part(
    hypotheses: Sequence[str],
    references: Sequence[str],
    parts: Mapping[str, Integers],
    signature: str | None = None,
) -> dict[str, float | None]:
    """Corpus BLEU of each part of the sentences; None for an empty part.

    Example:
        >>> text = ["one two three four", "five six seven eight", "a b c d"]
        >>> parts = frequency_parts(np.array([3.0, 2.0, 1.0]))
        >>> bleu_by_part(text[:2] + ["w x y z"], text, parts)["least"]
        0.0
    """
    metric = bleu_metric(signature)

    def score(index: Integers) -> float | None:
        if len(index) == 0:
            return None
        chosen = [hypotheses[i] for i in index]
        return float(metric.corpus_score(chosen, [[references[i] for i in index]]).score)

    return {part: score(index) for part, index in parts.items()}


def histogram(probabilities: Floats, bins: int = BINS) -> list[float] | None:
    """(bins,) shares of tokens in bins of equal width, of which the last has 1; None without any.

    Example:
        >>> histogram(np.array([0.1, 0.4, 0.45, 1.0]), bins=4)
        [0.25, 0.5, 0.0, 0.25]
    """
    if len(probabilities) == 0:
        return None
    edges = np.arange(bins + 1) / bins  # each is rounded once: 0.57 is edge 57 of 100
    count, _ = np.histogram(probabilities, edges)
    shares: list[float] = (count / count.sum()).tolist()
    return shares


def peak(shares: Sequence[float]) -> float:
    """The middle of the fullest bin of a histogram over [0, 1]."""
    return (int(np.argmax(shares)) + 0.5) / len(shares)


def chosen_probabilities(
    probabilities: Sequence[Floats], parts: Mapping[str, Integers]
) -> dict[str, Any]:
    """Shares, mean and peak of the probabilities that beam search chose, for "all" and each part.

    Example:
        >>> found = chosen_probabilities([np.array([0.875, 0.875]), np.array([0.125])], {})
        >>> found["mean"]["all"], found["peak"]["all"]
        (0.625, 0.875)
    """
    chosen = {"all": np.arange(len(probabilities)), **parts}
    pools = {
        part: np.concatenate([np.empty(0), *(probabilities[i] for i in index)])
        for part, index in chosen.items()
    }
    shares = {part: histogram(pool) for part, pool in pools.items()}
    return {
        "shares": shares,
        "mean": {part: float(pool.mean()) if len(pool) else None for part, pool in pools.items()},
        "peak": {part: None if share is None else peak(share) for part, share in shares.items()},
    }
