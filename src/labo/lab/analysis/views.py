"""A VIEW: everything that is measured of a list of predictions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .calibration import confidence_measures
from .intervals import bootstrap_intervals
from .reading import Booleans, Floats, Integers
from .selective import selective_measures

# Measures that need more than confidence and correctness; None in a view that lacks it.
FURTHER = ("nll", "brier", "classwise_ece", "entropy")


def view(
    confidence: Floats,
    right: Booleans,
    units: Integers | None = None,
    further: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Calibration, selective classification and intervals.

    Args:
        confidence: (N,) the probability of each prediction, N > 0.
        right: (N,) whether it is right.
        units: (N,) which samples the bootstrap draws together.
        further: values for names of ``FURTHER``.

    Returns:
        A VIEW, as :mod:`labo.lab.analysis.run` describes it.
    """
    return {
        **confidence_measures(confidence, right),
        **dict.fromkeys(FURTHER),
        **(further or {}),
        "selective": selective_measures(confidence, right),
        "intervals": bootstrap_intervals(confidence, right, units),
    }


def verdict(view: Mapping[str, Any]) -> str:
    """Whether a model is under- or overconfident, in words.

    It is called neither if 0 is in the interval of accuracy - mean confidence.

    Example:
        >>> verdict({"underconfidence": 0.213, "intervals": {"underconfidence": [0.19, 0.24]}})
        'is underconfident by 0.213'
        >>> verdict({"underconfidence": -0.004, "intervals": {"underconfidence": [-0.02, 0.01]}})
        'is neither under- nor overconfident'
    """
    gap, (low, high) = view["underconfidence"], view["intervals"]["underconfidence"]
    if low <= 0 <= high:
        return "is neither under- nor overconfident"
    return f"is {'under' if gap > 0 else 'over'}confident by {abs(gap):.3f}"
