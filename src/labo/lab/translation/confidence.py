"""Histograms of the probabilities of the tokens that beam search chose (Figure 2 of the paper)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..analysis.reading import Floats, Integers

BINS = 20


def _edges(bins: int) -> Floats:
    """(bins + 1,) each is b / bins, rounded once: 0.57 is edge 57 of 100."""
    edges: Floats = np.arange(bins + 1) / bins
    return edges


def histogram(probabilities: Floats, bins: int = BINS) -> list[float] | None:
    """The share of tokens in each of the bins of equal width; the last bin includes 1.

    Args:
        probabilities: (tokens,).
        bins: the number of bins.

    Returns:
        (bins,) shares that sum to 1, or None if there are no tokens.

    Example:
        >>> histogram(np.array([0.1, 0.4, 0.45, 1.0]), bins=4)
        [0.25, 0.5, 0.0, 0.25]
    """
    if len(probabilities) == 0:
        return None
    count, _ = np.histogram(probabilities, _edges(bins))
    shares: list[float] = (count / count.sum()).tolist()
    return shares


def chosen_probabilities(
    probabilities: Sequence[Floats], parts: Mapping[str, Integers], bins: int = BINS
) -> dict[str, Any]:
    """Histograms over all sentences and over each part of them.

    Args:
        probabilities: of the chosen tokens, one array per sentence.
        parts: from :func:`labo.lab.translation.frequency.frequency_parts`.
        bins: the number of bins.

    Returns:
        edges; and shares and peak (the middle of the fullest bin), each for "all" and for every
        part.

    Example:
        >>> found = chosen_probabilities([np.array([0.9, 0.8]), np.array([0.3])], {}, bins=2)
        >>> found["shares"]["all"], found["peak"]["all"]
        ([0.3333333333333333, 0.6666666666666666], 0.75)
    """
    chosen = {"all": np.arange(len(probabilities)), **parts}
    pools = {
        part: np.concatenate([np.empty(0), *(probabilities[i] for i in index)])
        for part, index in chosen.items()
    }
    shares = {part: histogram(pool, bins) for part, pool in pools.items()}
    return {
        "edges": _edges(bins).tolist(),
        "shares": shares,
        "peak": {
            part: None if share is None else (int(np.argmax(share)) + 0.5) / bins
            for part, share in shares.items()
        },
    }
