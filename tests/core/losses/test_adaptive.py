"""GCE, GEM, Zipf, ACLS and adaptive smoothing: worked numbers."""

from __future__ import annotations

import pytest
import torch

from labo import functional as F
from loss_cases import gradient
from worked import BATCH, TARGETS, Y0, Y1, A, B, T, near


def test_gem():
    near(F.gem_loss(B, Y1), 1.624934)
    near(gradient(lambda z: F.gem_loss(z, Y0), A), [-0.242233, 0.181600, 0.050204, 0.010430])
    near(F.gem_loss(B, Y1, h="logsigmoid"), 0.820012)
    slope = gradient(lambda z: F.gem_loss(z, Y0, h="logsigmoid"), A)
    near(slope, [-0.120346, 0.090346, 0.024863, 0.005137])


def test_generalized_cross_entropy():
    gce = F.generalized_cross_entropy_loss
    for gamma, (of_a, of_b) in {
        0.1: (0.439368, 2.247740),
        0.7: (0.385514, 1.188190),
        1.0: (0.361934, 0.921606),
    }.items():
        near(gce(A, Y0, gamma=gamma), of_a)
        near(gce(B, Y1, gamma=gamma), of_b)
    near(gradient(lambda z: gce(z, Y0), A), [-0.264262, 0.171387, 0.069681, 0.023195])
    of_dft = gradient(lambda z: F.dft_loss(z, Y0), A)
    near(gradient(lambda z: gce(z, Y0, gamma=1.0), A), of_dft.tolist())


def test_zipf_smoothing():
    zipf = F.zipf_smoothing_loss
    near(zipf(B, Y1, lam=1.0), 2.560906)
    slope = gradient(lambda z: zipf(z, Y0, lam=1.0), A)
    near(slope, [-0.361934, 0.421741, 0.051423, -0.111230])
    slope = gradient(lambda z: zipf(z, Y1, lam=1.0), B)
    near(slope, [0.171594, -0.921606, 0.662336, 0.087676])
    # B is predicted wrongly
    near(zipf(BATCH, TARGETS, lam=1.0, correct_only=True, reduction="sum"), 0.562888 + 2.546006)
    tied = torch.tensor([1.0, 0.0, 0.0, -1.0], dtype=torch.float64)  # ranks 1, 2, 2, 4
    pi = torch.tensor([0.5, 0.5, 0.25], dtype=torch.float64) / 1.25
    others = tied[1:].log_softmax(-1)
    expected = F.cross_entropy_loss(tied, Y0) + (pi * (pi.log() - others)).sum()
    near(zipf(tied, Y0, lam=1.0), expected.item())


def test_acls():
    near(F.acls_loss(A, Y0), 0.449313)  # nothing is beyond the margin of 10
    near(F.acls_loss(B, Y1, margin=1.0), 2.575173)
    slope = gradient(lambda z: F.acls_loss(z, Y0, margin=1.0), A)
    near(slope, [-0.161934, 0.234731, 0.089435, 0.018434])
    slope = gradient(lambda z: F.acls_loss(z, Y1, margin=1.0), B)
    near(slope, [0.213097, -0.928273, 0.679259, 0.125917])


@pytest.mark.parametrize(
    ("z", "y", "rho", "uniform", "prior"),
    [
        (A, Y0, 0.5, 1.413241, 0.631278),
        (A, Y0, 1.0, 0.902169, 0.534801),
        (B, Y1, 0.5, 2.021237, 1.990100),
        (B, Y1, 1.0, 2.371468, 2.361112),
    ],
)
def test_adaptive_smoothing(z, y, rho, uniform, prior):
    near(F.adaptive_smoothing_loss(z, y, rho=rho), uniform)
    near(F.prior_smoothing_loss(z, y, rho=rho), uniform)
    near(F.prior_smoothing_loss(z, y, T, rho=rho), prior)
