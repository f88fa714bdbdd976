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
    """(bins,) shares of tokens in bins of equal width, of which the last has 1; None without any.

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
    """Histograms of the chosen tokens of all sentences and of each part of them.

    Shares, mean and peak (the middle of the fullest bin) are given for "all" and for every part.

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
        "mean": {part: float(pool.mean()) if len(pool) else None for part, pool in pools.items()},
        "peak": {
            part: None if share is None else (int(np.argmax(share)) + 0.5) / bins
            for part, share in shares.items()
        },
    }
