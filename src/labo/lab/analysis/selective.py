r"""Selective classification: answer where the confidence is high, abstain elsewhere.

The risk at coverage n / N is the share of errors among the n predictions of highest confidence. The
area under the risk-coverage curve, AURC, is the mean of the risk over all n. Label smoothing is
known to make it worse (Xia et al. 2025).

Predictions of equal confidence share their errors evenly, which is the mean over all their orders.
So the order of the samples does not matter.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .reading import Booleans, Floats

NORMS = range(1, 11)
CURVE_POINTS = 101


def risk_coverage(confidence: Floats, right: Booleans) -> tuple[Floats, Floats]:
    """The coverages (N,) from 1/N to 1, and the risk at each; confidence and right are (N,).

    Any score will do that is larger where the model is more confident.

    Example:
        >>> risk_coverage(np.array([0.9, 0.5]), np.array([True, False]))
        (array([0.5, 1. ]), array([0. , 0.5]))
    """
    _, group, count = np.unique(-confidence, return_inverse=True, return_counts=True)
    error_rate = np.bincount(group, ~right) / count
    rank = np.arange(1, len(right) + 1)
    return rank / len(right), np.repeat(error_rate, count).cumsum() / rank


def aurc(confidence: Floats, right: Booleans) -> float:
    r"""Area under the risk-coverage curve, :math:`\frac1N \sum_n \mathrm{risk}(n)`.

    Example:
        >>> aurc(np.array([0.9, 0.5]), np.array([True, False]))
        0.25
    """
    return float(risk_coverage(confidence, right)[1].mean())


def selective_measures(confidence: Floats, right: Booleans) -> dict[str, Any]:
    """AURC, and at most ``CURVE_POINTS`` points of the curve.

    Example:
        >>> measures = selective_measures(np.array([0.9, 0.5]), np.array([True, False]))
        >>> measures["aurc"], measures["curve"]
        (0.25, {'coverage': [0.5, 1.0], 'risk': [0.0, 0.5]})
    """
    coverage, risk = risk_coverage(confidence, right)
    shown = np.unique(np.linspace(0, len(risk) - 1, CURVE_POINTS).round().astype(int))
    return {
        "aurc": float(risk.mean()),
        "curve": {"coverage": coverage[shown].tolist(), "risk": risk[shown].tolist()},
    }


# ------------------------------------------------------------------ normalised logits


def normalised_logit(log_p: Floats, p: int) -> Floats:
    r"""The largest centred logit divided by the p-norm (MaxLogit-pNorm, Cattelan and Silva 2024).

    .. math:: \max_k \frac{z_k - \bar z}{\lVert z - \bar z \rVert_p}

    From log-probabilities (N, K), which are logits minus a constant, to scores (N,) to rank by; 0
    where all classes are equally probable.

    Example:
        >>> normalised_logit(np.log([[0.5, 0.25, 0.25], [0.98, 0.01, 0.01]]), p=2).round(4)
        array([0.8165, 0.8165])
    """
    centred = log_p - log_p.mean(-1, keepdims=True)
    largest = np.abs(centred).max(-1)
    scaled = centred / np.where(largest > 0, largest, 1)[:, None]  # no overflow at any p
    norm = (np.abs(scaled) ** p).sum(-1) ** (1 / p)
    return scaled.max(-1) / np.where(norm > 0, norm, 1)


def choose_norm(log_p: Floats, right: Booleans) -> int | None:
    """The p from 1 to 10 that ranks best on the validation split, log_p (N, K) and right (N,).

    None if the largest probability itself ranks at least as well.

    Example:
        >>> choose_norm(np.log([[0.6, 0.4], [0.9, 0.1]]), np.array([True, True]))
    """
    area, p = min((aurc(normalised_logit(log_p, p), right), p) for p in NORMS)
    return p if area < aurc(log_p.max(-1), right) else None
