r"""Calibration errors, proper scores, and temperature scaling.

``confidence`` is the probability of the predicted class, ``right`` is whether the prediction is
right. There are B = 15 bins, of equal width unless stated otherwise. A confidence on an edge is in
the bin above it; a confidence of 1 is in the last bin. The training loop uses the same bins.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .reading import Booleans, Floats, Integers

if TYPE_CHECKING:  # loaded when something is computed: reading runs needs no torch
    from torch import Tensor

    from ...calibration import ReliabilityBins

BINS = 15


# ------------------------------------------------------------------ bins


def bin_index(confidence: Floats, bins: int = BINS) -> Integers:
    """(...) the bin of each confidence, from 0.

    Example:
        >>> bin_index(np.array([0.0, 0.2, 0.99, 1.0]), bins=5)
        array([0, 1, 4, 4])
    """
    index: Integers = np.minimum((confidence * bins).astype(np.int64), bins - 1)
    return index


def reliability(confidence: Floats, right: Booleans, bins: int = BINS) -> dict[str, Any]:
    """The reliability diagram: mean confidence and accuracy of each bin.

    Args:
        confidence: (N,).
        right: (N,).
        bins: B.

    Returns:
        edges (B + 1), count (B), confidence (B) and accuracy (B), with None for an empty bin.

    Example:
        >>> found = reliability(np.array([0.2, 0.9, 1.0]), np.array([False, True, False]), bins=2)
        >>> found["count"], found["confidence"], found["accuracy"]
        ([1, 2], [0.2, 0.95], [0.0, 0.5])
    """
    found = _core(confidence, right, bins)
    return {
        "edges": found.edges.tolist(),
        "count": found.count.tolist(),
        "confidence": _or_none(found.confidence),
        "accuracy": _or_none(found.accuracy),
    }


def _core(
    confidence: Floats, right: Booleans, bins: int, *, adaptive: bool = False
) -> ReliabilityBins:
    import torch

    from ...calibration import ReliabilityBins

    pair = torch.from_numpy(confidence), torch.from_numpy(right)
    return ReliabilityBins.of(*pair, bins, adaptive=adaptive)


def _or_none(means: Tensor) -> list[float | None]:
    return [None if math.isnan(mean) else mean for mean in means.tolist()]


def _logits(probabilities: Floats, labels: Integers) -> tuple[Tensor, Tensor]:
    import torch

    return torch.from_numpy(probabilities).log(), torch.from_numpy(labels)


def _gaps(confidence: Floats, right: Booleans | Floats, index: Integers, bins: int) -> Floats:
    """(B,) of each bin: the sum of confidence - right."""
    return np.bincount(index, confidence - right, bins).astype(np.float64)


def ece(confidence: Floats, right: Booleans, bins: int = BINS) -> float:
    r"""Expected calibration error.

    .. math:: \sum_b \frac{n_b}{N} |\mathrm{acc}_b - \mathrm{conf}_b|

    Args:
        confidence: (N,).
        right: (N,).
        bins: B.

    Example:
        >>> ece(np.array([1.0, 1.0]), np.array([True, False]))
        0.5
    """
    return _core(confidence, right, bins).expected_error


def adaptive_ece(confidence: Floats, right: Booleans, bins: int = BINS) -> float:
    """The ECE with bins of equal mass: the sorted confidences, cut into B bins of N / B samples.

    Equal confidences share their accuracy, so the order of the samples does not matter.

    Args:
        confidence: (N,).
        right: (N,).
        bins: B.

    Example:
        >>> right = np.array([True, False, True, True])
        >>> adaptive_ece(np.array([0.5, 0.625, 0.75, 0.875]), right, bins=2)
        0.125
    """
    return _core(confidence, right, bins, adaptive=True).expected_error


def classwise_ece(probabilities: Floats, labels: Integers, bins: int = BINS) -> float:
    r"""Calibration error of the probabilities of all classes, not only of the predicted one.

    .. math:: \frac{1}{K} \sum_k \sum_b \frac{n_{kb}}{N} |\mathrm{freq}_{kb} - \mathrm{conf}_{kb}|

    Args:
        probabilities: (N, K).
        labels: (N,).
        bins: B.

    Example:
        >>> round(classwise_ece(np.array([[0.75, 0.25], [0.75, 0.25]]), np.array([0, 0])), 4)
        0.25
    """
    from ...calibration import classwise_calibration_error

    return classwise_calibration_error(*_logits(probabilities, labels), bins=bins)


def mce(confidence: Floats, right: Booleans, bins: int = BINS) -> float:
    r"""Maximum calibration error: :math:`\max_b |\mathrm{acc}_b - \mathrm{conf}_b|`.

    It is the gap of the worst bin, however few samples it has.

    Args:
        confidence: (N,).
        right: (N,).
        bins: B.

    Example:
        >>> mce(np.array([0.25, 1.0, 1.0]), np.array([True, True, True]))
        0.75
    """
    return _core(confidence, right, bins).maximum_error


def ece_floor(confidence: Floats, bins: int = BINS, *, draws: int = 200, seed: int = 0) -> float:
    """The expected ECE of a perfectly calibrated model with these confidences.

    With few samples the ECE is far from 0 by chance alone. An ECE that is not larger than this one
    is no evidence of miscalibration.

    Args:
        confidence: (N,).
        bins: B.
        draws: how many times ``right`` is drawn, with the confidence as its probability.
        seed: of the draws.

    Example:
        >>> ece_floor(np.array([1.0, 1.0]))
        0.0
    """
    random, index = np.random.default_rng(seed), bin_index(confidence, bins)
    total = 0.0
    for _ in range(draws):
        gaps = _gaps(confidence, random.random(len(confidence)) < confidence, index, bins)
        total += float(np.abs(gaps).sum())
    return total / (draws * len(confidence))


# ------------------------------------------------------------------ proper scores


def nll(log_p: Floats, labels: Integers) -> float:
    r"""Negative log-likelihood :math:`-\frac1N \sum_n \log p_n(y_n)`, in nats.

    Args:
        log_p: (N, K).
        labels: (N,).

    Example:
        >>> round(nll(np.log([[0.5, 0.5], [0.25, 0.75]]), np.array([0, 1])), 4)
        0.4904
    """
    return float(-np.take_along_axis(log_p, labels[:, None], -1).mean())


def brier(probabilities: Floats, labels: Integers) -> float:
    r"""Brier score :math:`\frac1N \sum_n \sum_k (p_{nk} - [k = y_n])^2`, from 0 to 2.

    Args:
        probabilities: (N, K).
        labels: (N,).

    Example:
        >>> brier(np.array([[1.0, 0.0], [0.5, 0.5]]), np.array([0, 1]))
        0.25
    """
    from ...calibration import brier_score

    return brier_score(*_logits(probabilities, labels))


def entropy(log_p: Floats) -> Floats:
    r"""(N,) entropy :math:`-\sum_k p_k \log p_k` of each prediction, in nats.

    Example:
        >>> entropy(np.log([[0.5, 0.5]])).round(4)
        array([0.6931])
    """
    values: Floats = -(np.exp(log_p) * _finite(log_p)).sum(-1)
    return values


def _finite(log_p: Floats) -> Floats:
    """Log-probabilities with 0 for -inf, so that p log p is 0 where p is."""
    values: Floats = np.where(log_p == -np.inf, 0.0, log_p)
    return values


# ------------------------------------------------------------------ temperature


def tempered(log_p: Floats, temperature: float) -> Floats:
    """(N, K) the log-probabilities of softmax(z / T), from those at T = 1.

    Example:
        >>> np.exp(tempered(np.log([[0.8, 0.2]]), 2.0)).round(4)
        array([[0.6667, 0.3333]])
    """
    scaled = log_p / temperature
    scaled = scaled - scaled.max(-1, keepdims=True)
    result: Floats = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
    return result


def fit_temperature(log_p: Floats, labels: Integers) -> float | None:
    r"""The temperature that minimizes the negative log-likelihood (Guo et al. 2017).

    By :func:`labo.calibration.fit_temperature`.

    Args:
        log_p: (N, K) on the validation split.
        labels: (N,).

    Returns:
        T, or None if no temperature is best, as when every prediction is right.

    Example:
        >>> log_p = np.log([[0.9, 0.1]] * 4)
        >>> T = fit_temperature(log_p, np.array([0, 0, 0, 1]))  # confidence 0.9, accuracy 0.75
        >>> round(T, 4), np.exp(tempered(log_p, T))[0].round(4).tolist()
        (2.0, [0.75, 0.25])
    """
    import torch

    from ...calibration import TemperatureError, fit_temperature

    try:
        return fit_temperature(torch.from_numpy(log_p), torch.from_numpy(labels)).temperature
    except TemperatureError:
        return None


# ------------------------------------------------------------------ all of them


def confidence_measures(confidence: Floats, right: Booleans) -> dict[str, Any]:
    """Everything that can be computed from confidence and correctness.

    Args:
        confidence: (N,), N > 0.
        right: (N,).

    Returns:
        name -> number, None where it is undefined; and the reliability diagram.

    Example:
        >>> measures = confidence_measures(np.array([0.5, 0.75]), np.array([True, True]))
        >>> measures["underconfidence"], measures["confidence_on_errors"]
        (0.375, None)
    """
    accuracy, mean = float(right.mean()), float(confidence.mean())
    return {
        "samples": len(confidence),
        "accuracy": accuracy,
        "confidence": mean,
        "underconfidence": accuracy - mean,
        "ece": ece(confidence, right),
        "ece_floor": ece_floor(confidence),
        "adaptive_ece": adaptive_ece(confidence, right),
        "mce": mce(confidence, right),
        "errors": int((~right).sum()),
        "confidence_on_right": float(confidence[right].mean()) if right.any() else None,
        "confidence_on_errors": float(confidence[~right].mean()) if not right.all() else None,
        "reliability": reliability(confidence, right),
    }
