"""A VIEW: everything that is measured of a list of predictions.

The mathematics of calibration is that of :mod:`labo.calibration`: 15 bins of equal width, as in the
training loop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .intervals import underconfidence_interval
from .reading import Booleans, Floats, Integers
from .selective import selective_measures

if TYPE_CHECKING:  # loaded when something is computed: reading runs needs no torch
    from torch import Tensor


def view(
    confidence: Floats,
    right: Booleans,
    units: Integers | None = None,
    nll: float | None = None,
) -> dict[str, Any]:
    """Calibration and selective classification.

    Args:
        confidence: (N,) the probability of each prediction, N > 0.
        right: (N,) whether it is right.
        units: (N,) which samples the bootstrap draws together.
        nll: the negative log-likelihood of the labels, where it is known.

    Returns:
        A VIEW: accuracy, confidence (its mean), underconfidence (accuracy - confidence) with its
        95 % interval, nll, ece, confidence_on_right, confidence_on_errors, reliability (count, mean
        confidence and accuracy of 15 bins), and selective: AURC, excess AURC and the curve.

    Example:
        >>> import numpy as np
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
