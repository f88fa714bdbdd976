"""Scores of a classifier from its log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

ECE_BINS = 15


def classification_scores(log_p: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy (a fraction), NLL, ECE, mean entropy (in nats) and mean confidence.

    The confidence is the largest probability of a prediction.

    Args:
        log_p: (N, K) log-probabilities.
        labels: (N,) class indices.
    """
    log_p = log_p.double()
    p = log_p.exp()
    confidence, prediction = p.max(-1)
    right = (prediction == labels).double()
    return {
        "accuracy": right.mean().item(),
        "nll": -log_p.gather(-1, labels.unsqueeze(-1)).mean().item(),
        "ece": expected_calibration_error(confidence, right),
        "entropy": -torch.where(p > 0, p * log_p, 0.0).sum(-1).mean().item(),
        "confidence": confidence.mean().item(),
    }


def expected_calibration_error(confidence: Tensor, right: Tensor) -> float:
    """Expected calibration error: the gap of confidence and accuracy in 15 bins of equal width.

    Args:
        confidence: (N,) the largest probability of each prediction.
        right: (N,) 1 where the prediction is correct, else 0.

    Example:
        >>> expected_calibration_error(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.0]))
        0.5
    """
    bins = (confidence * ECE_BINS).long().clamp(max=ECE_BINS - 1)  # the last bin is closed
    gap = torch.zeros(ECE_BINS, dtype=torch.float64)
    gap.index_add_(0, bins.cpu(), (confidence - right).double().cpu())
    return (gap.abs().sum() / len(confidence)).item()
