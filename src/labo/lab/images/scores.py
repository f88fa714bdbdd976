"""Scores of a classifier from its log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from ...calibration import ReliabilityBins


def classification_scores(log_p: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy (a fraction), NLL, ECE, mean entropy (in nats) and mean confidence.

    The confidence is the largest probability of a prediction; log_p is (N, K), and labels (N,).
    """
    log_p = log_p.double()
    p = log_p.exp()
    confidence, prediction = p.max(-1)
    right = (prediction == labels).double()
    return {
        "accuracy": right.mean().item(),
        "nll": -log_p.gather(-1, labels.unsqueeze(-1)).mean().item(),
        "ece": ReliabilityBins.of(confidence, right).expected_error,
        "entropy": -torch.where(p > 0, p * log_p, 0.0).sum(-1).mean().item(),
        "confidence": confidence.mean().item(),
    }
