"""smoothed_cross_entropy: the objective with a smoothing distribution of one's own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import oracle
from labo import functional as F
from labo import smoothing

ALPHA = torch.tensor([0.1, 0.3, 0.7, 0.9], dtype=torch.float64)
BETA = torch.tensor([0.3, 0.0, 1.1, 0.1], dtype=torch.float64)
LOGITS = 2 * torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
TARGET = torch.tensor([2, 5, 0, 2])


def test_strengths_per_sample_are_those_of_the_oracle():
    p = LOGITS.flip(-1).softmax(-1)
    values = F.smoothed_cross_entropy(LOGITS, TARGET, p, alpha=ALPHA, beta=BETA, reduction="none")
    z, q, w = oracle.real(LOGITS.numpy()), oracle.real(p.numpy()), oracle.real(np.ones(6))
    for i, y in enumerate(TARGET.tolist()):
        exact = oracle.smoothed(z[i], y, w, q[i], oracle.real(ALPHA[i].item()))
        exact += oracle.real(BETA[i].item()) * oracle.kl(q[i], 1 / oracle.real(6))
        assert values[i].item() == pytest.approx(float(exact), rel=1e-12)
        numbers = {"alpha": ALPHA[i].item(), "beta": BETA[i].item()}
        alone = F.smoothed_cross_entropy(LOGITS[i], TARGET[i], p[i], **numbers)
        torch.testing.assert_close(values[i], alone)


def test_mass_on_a_masked_class_is_infinite():
    """What the caller puts on an impossible class is not hidden, unless it has no share."""
    logits, target = torch.tensor([[0.0, 1.0, -math.inf]]), torch.tensor([0])
    prior = torch.full((1, 3), 1 / 3)
    assert F.smoothed_cross_entropy(logits, target, prior, alpha=0.1) == math.inf
    elsewhere = torch.tensor([[0.5, 0.5, 0.0]])
    assert F.smoothed_cross_entropy(logits, target, elsewhere, alpha=0.1).isfinite()
    value = F.smoothed_cross_entropy(logits, target, prior, alpha=0.0)
    torch.testing.assert_close(value, F.cross_entropy_loss(logits, target))


def test_refuses_wrong_smoothing():
    uniform = smoothing.uniform(LOGITS)

    def objective(p_ls, **arguments):
        return F.smoothed_cross_entropy(LOGITS, TARGET, p_ls, **({"alpha": 0.1} | arguments))

    with pytest.raises(ValueError, match="smoothing must have the shape of the logits"):
        objective(uniform[0])
    with pytest.raises(ValueError, match="smoothing must be probabilities"):
        objective(2 * uniform)
    with pytest.raises(ValueError, match=r"alpha must be a number or have the shape \(4,\)"):
        objective(uniform, alpha=torch.zeros(3))
    with pytest.raises(ValueError, match=r"alpha must lie in \[0, 1\]"):
        objective(uniform, alpha=torch.tensor([0.1, 0.2, -0.3, 0.4]))
