"""A VIEW: everything that is measured of a list of predictions.

The mathematics of calibration is that of :mod:`labo.calibration`: 15 bins of equal width, as in the
training loop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .reading import Booleans, Floats, Integers
from .selective import selective_measures

if TYPE_CHECKING:  # loaded when something is computed: reading runs needs no torch
    from torch import Tensor

LEVEL = 0.95  # of the interval


def view(
    confidence: Floats,
    right: Booleans,
    units: Integers | None = None,
    nll: float | None = None,
) -> dict[str, Any]:
    """A VIEW of N > 0 predictions: calibration and selective classification.

    confidence, (N,), is the probability of each prediction, and right, (N,), whether it is right.
    ``units`` are those of :func:`underconfidence_interval`. The reliability diagram has the count,
    the mean confidence and the accuracy of 15 bins.

    Example:
        >>> shown = view(np.array([0.5, 0.75]), np.array([True, True]))
        >>> shown["underconfidence"], shown["ece"], shown["confidence_on_errors"]
        (0.375, 0.375, None)
    """
    import torch

    from ...calibration import ReliabilityBins

    bins = ReliabilityBins.of(torch.from_numpy(confidence), torch.from_numpy(right))
    accuracy, mean = float(right.mean()), float(confidence.mean())
    return {
        "accuracy": accuracy,
        "confidence": mean,
        "underconfidence": accuracy - mean,
        "underconfidence_interval": underconfidence_interval(confidence, right, units),
        "nll": nll,
        "ece": bins.expected_error,
        "confidence_on_right": float(confidence[right].mean()) if right.any() else None,
        "confidence_on_errors": float(confidence[~right].mean()) if not right.all() else None,
        "reliability": {
            "count": bins.count.tolist(),
            "confidence": _or_none(bins.confidence),
            "accuracy": _or_none(bins.accuracy),
        },
        "selective": selective_measures(confidence, right),
    }


def _or_none(means: Tensor) -> list[float | None]:
    return [None if math.isnan(mean) else mean for mean in means.tolist()]


def underconfidence_interval(
    confidence: Floats, right: Booleans, units: Integers | None = None, *, draws: int = 1000
) -> list[float]:
    """The 95 % interval of accuracy - mean confidence, by the bootstrap: [low, high].

    ``units``, (N,), says which samples are drawn together, numbered from 0; by default each alone.
    Tokens are drawn by the sentence, because the errors within a sentence are correlated.

    Example:
        >>> underconfidence_interval(np.array([0.75, 0.75]), np.array([True, True]))
        [0.25, 0.25]
    """
    units = np.arange(len(right)) if units is None else units
    gaps, counts = np.bincount(units, right - confidence), np.bincount(units)
    size = len(counts)
    random = np.random.default_rng(0)
    drawn = []
    for _ in range(draws):
        times = np.bincount(random.integers(0, size, size), minlength=size)
        samples = times @ counts
        if samples:  # none if only units without a sample were drawn
            drawn.append(times @ gaps / samples)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return [float(low), float(high)]


def verdict(view: Mapping[str, Any]) -> str:
    """Whether a model is under- or overconfident, in words.

    It is called neither if 0 is in the interval of accuracy - mean confidence.

    Example:
        >>> verdict({"underconfidence": 0.213, "underconfidence_interval": [0.19, 0.24]})
        'is underconfident by 0.213'
        >>> verdict({"underconfidence": -0.004, "underconfidence_interval": [-0.02, 0.01]})
        'is neither under- nor overconfident'
    """
    gap, (low, high) = view["underconfidence"], view["underconfidence_interval"]
    if low <= 0 <= high:
        return "is neither under- nor overconfident"
    return f"is {'under' if gap > 0 else 'over'}confident by {abs(gap):.3f}"
