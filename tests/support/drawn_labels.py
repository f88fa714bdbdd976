"""Logits whose calibration is known, for tests."""

from __future__ import annotations

import math

import torch


def drawn(seed, rows, classes, *, sharpness=1.0, masked=False, dtype=torch.float64):
    """Logits and labels drawn from them, the logits then sharpened; some classes masked."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, classes, generator=generator, dtype=torch.float64) * 2
    target = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
    logits = logits * sharpness
    if masked and classes > 2:
        others = torch.rand(rows, classes, generator=generator) < 0.3
        others[torch.arange(rows), target] = False
        logits = logits.masked_fill(others, -math.inf)
    return logits.to(dtype), target


def pairs(*confidences):
    """Logits of two classes, the first of which has these probabilities."""
    p = torch.tensor(confidences, dtype=torch.float64)
    return torch.stack([p, 1 - p], -1).log()
