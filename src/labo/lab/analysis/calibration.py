r"""Calibration errors, proper scores, and temperature scaling.

``confidence`` is the probability of the predicted class, ``right`` is whether the prediction is
right. There are B = 15 bins, of equal width unless stated otherwise. A confidence on an edge is in
the bin above it; a confidence of 1 is in the last bin. The training loop uses the same bins.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .reading import Booleans, Floats, Integers

BINS = 15
TEMPERATURES = (0.01, 100.0)  # the range a temperature is fitted in


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
    index = bin_index(confidence, bins)
    count = np.bincount(index, minlength=bins)

    def means(values: Floats | Booleans) -> list[float | None]:
        total = np.bincount(index, values.astype(np.float64), bins)
        return [float(t / n) if n else None for t, n in zip(total, count, strict=True)]

    return {
        "edges": np.linspace(0, 1, bins + 1).tolist(),
        "count": count.tolist(),
        "confidence": means(confidence),
        "accuracy": means(right),
    }


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
    gaps = _gaps(confidence, right, bin_index(confidence, bins), bins)
    return float(np.abs(gaps).sum() / len(confidence))


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
    order, accuracy = shared_accuracy(confidence, right)
    gaps = np.array_split(confidence[order] - accuracy, min(bins, len(confidence)))
    return float(sum(abs(gap.sum()) for gap in gaps) / len(confidence))


def shared_accuracy(confidence: Floats, right: Booleans) -> tuple[Integers, Floats]:
    """The ascending order of the confidences, and the accuracy in it, shared by equal ones.

    Example:
        >>> shared_accuracy(np.array([0.9, 0.2, 0.9]), np.array([True, False, False]))
        (array([1, 0, 2]), array([0. , 0.5, 0.5]))
    """
    order = np.argsort(confidence, kind="stable")
    _, rank, count = np.unique(confidence, return_inverse=True, return_counts=True)
    share = np.bincount(rank, right.astype(np.float64)) / count
    return order, share[rank[order]]


def classwise_ece(probabilities: Floats, labels: Integers, bins: int = BINS) -> float:
    r"""Calibration error of the probabilities of all classes, not only of the predicted one.

    .. math:: \frac{1}{K} \sum_k \sum_b \frac{n_{kb}}{N} |\mathrm{freq}_{kb} - \mathrm{conf}_{kb}|

    Args:
        probabilities: (N, K).
        labels: (N,).
        bins: B.

    Example:
        >>> classwise_ece(np.array([[0.75, 0.25], [0.75, 0.25]]), np.array([0, 0]))
        0.25
    """
    size, classes = probabilities.shape
    total = 0.0
    for k in range(classes):
        column = probabilities[:, k]
        total += float(np.abs(_gaps(column, labels == k, bin_index(column, bins), bins)).sum())
    return total / (size * classes)


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
    index = bin_index(confidence, bins)
    gaps, count = _gaps(confidence, right, index, bins), np.bincount(index, minlength=bins)
    return float((np.abs(gaps) / np.maximum(count, 1)).max())


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
    on_label = np.take_along_axis(probabilities, labels[:, None], -1)[:, 0]
    return float(((probabilities**2).sum(-1) - 2 * on_label + 1).mean())


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

    The NLL is convex in :math:`s = 1/T`. Its slope is the mean of :math:`\sum_k p_k z_k - z_y`, its
    curvature the mean of :math:`\mathrm{Var}_p(z)`. It is minimized by Newton's method between
    bounds at which the slope has different signs.

    Args:
        log_p: (N, K) on the validation split.
        labels: (N,).

    Returns:
        T, or None if the NLL has no minimum in ``TEMPERATURES``. If every prediction is right, for
        example, it decreases with T.

    Example:
        >>> log_p = np.log([[0.9, 0.1]] * 4)
        >>> T = fit_temperature(log_p, np.array([0, 0, 0, 1]))  # confidence 0.9, accuracy 0.75
        >>> round(T, 4), np.exp(tempered(log_p, T))[0].round(4).tolist()
        (2.0, [0.75, 0.25])
    """
    low, high = 1 / TEMPERATURES[1], 1 / TEMPERATURES[0]
    label = np.take_along_axis(log_p, labels[:, None], -1)[:, 0]
    if not np.isfinite(label).all():
        return None  # the NLL is infinite at every temperature
    z = _finite(log_p)

    def slope_and_curvature(s: float) -> tuple[float, float]:
        p = np.exp(tempered(log_p, 1 / s))
        mean = (p * z).sum(-1)
        return float((mean - label).mean()), float(((p * z**2).sum(-1) - mean**2).mean())

    if slope_and_curvature(low)[0] >= 0 or slope_and_curvature(high)[0] <= 0:
        return None
    s = 1.0
    for _ in range(100):
        slope, curvature = slope_and_curvature(s)
        low, high = (s, high) if slope < 0 else (low, s)
        step = s - slope / curvature if curvature > 0 else math.nan
        following = step if low < step < high else math.sqrt(low * high)
        if abs(following - s) <= 1e-12 * s or slope == 0:
            break
        s = following
    return 1 / s


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
