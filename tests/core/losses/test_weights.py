"""Cross entropy, its penalties and its weights of samples."""

from __future__ import annotations

import decimal
import math

import pytest
import torch

import labo
from backends import each_backend
from labo import functional as F
from labo import smoothing
from loss_cases import LossCase, batch, both, gradient
from probes import is_fused
from worked import BATCH, TARGETS, Y0, Y1, A, B, T, near


def test_basics():
    near(A.softmax(-1), [0.638066, 0.234731, 0.095435, 0.031767])
    near(F.cross_entropy_loss(B, Y1), 2.546006)
    near(F.cross_entropy_loss(BATCH, TARGETS), 1.497660)
    near(torch.distributions.Categorical(logits=BATCH).entropy(), [0.960673, 1.109767])


def test_confidence_penalty():
    near(F.confidence_penalty_loss(A, Y0, beta=0.1), 0.353246)
    near(F.confidence_penalty_loss(B, Y1, beta=0.1), 2.435030)
    slope = gradient(lambda z: F.confidence_penalty_loss(z, Y0, beta=0.1), A)
    near(slope, [-0.329306, 0.223262, 0.082182, 0.023862])


def test_confidence_penalty_threshold_costs_low_entropy():
    h = 0.960673
    near(F.confidence_penalty_loss(A, Y0, beta=0.1, threshold=0.5), 0.449313)
    near(F.confidence_penalty_loss(A, Y0, beta=0.1, threshold=1.2), 0.449313 + 0.1 * (1.2 - h))


def test_max_suppression():
    near(F.max_suppression_loss(A, Y0), F.label_smoothing_loss(A, Y0).item())
    near(F.max_suppression_loss(B, Y1), 2.658506)
    slope = gradient(lambda z: F.max_suppression_loss(z, Y1), B)
    near(slope[1:3], [-0.946606, 0.654259])


def test_max_suppression_gives_ties_to_the_first():
    tied = torch.tensor([0.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    penalty = gradient(lambda z: F.max_suppression_loss(z, Y0, lam=1.0), tied) - gradient(
        lambda z: F.cross_entropy_loss(z, Y0), tied
    )
    near(penalty, [-0.25, 0.75, -0.25, -0.25])


def test_margin_smoothing():
    near(gradient(lambda z: F.margin_smoothing_loss(z, Y0, margin=1.5), A)[0], -0.311934)
    near(F.margin_smoothing_loss(B, Y1, margin=1.2), 2.573506)
    near(gradient(lambda z: F.margin_smoothing_loss(z, Y1, margin=1.2), B)[2], 0.629259)
    near(F.margin_smoothing_loss(B, Y1, margin=0.0), 2.658506)


def test_poly1():
    near(F.poly1_loss(A, Y0, epsilon=1), 0.811247)
    near(F.poly1_loss(B, Y1, epsilon=1), 3.467612)
    near(gradient(lambda z: F.poly1_loss(z, Y0, epsilon=2), A)[0], -0.823809)
    smoothed = torch.tensor([0.925, 0.025, 0.025, 0.025], dtype=torch.float64)
    near(F.poly1_loss(A, smoothed, epsilon=2), 1.398294)
    near(gradient(lambda z: F.poly1_loss(z, smoothed, epsilon=2), A)[0], -0.702621)


def test_logit_norm():
    slope = gradient(lambda z: F.logit_norm_loss(z, Y0, tau=1.0), A)
    near(slope[0], -0.103437)
    near(slope @ A, 0.0)  # the scale of the logits does not matter
    near(F.logit_norm_loss(A, Y0, tau=0.04), 0.000037)
    near(F.logit_norm_loss(B, Y1, tau=0.04), 30.151133)


def test_logit_norm_has_a_floor():
    best = torch.tensor([3.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    near(F.logit_norm_loss(best, Y0, tau=1.0), 0.665496)


def test_logit_norm_at_zero():
    """The value is log K, and the gradient is bounded by the smallest norm, 0.001."""
    zero = torch.zeros(4, dtype=torch.float64)
    near(F.logit_norm_loss(zero, Y0, tau=1.0), math.log(4))
    slope = gradient(lambda z: F.logit_norm_loss(z, Y0, tau=1.0), zero)
    near(slope / 750, [-1 / 1.0001, *[1 / 3.0003] * 3])


def test_dft():
    near(F.dft_loss(B, Y1), 0.199592)
    near(gradient(lambda z: F.dft_loss(z, Y0), A)[0], -0.230938)
    # with the factor in the graph the gradient has the wrong sign: 0.111697
    near(gradient(lambda z: F.dft_loss(z, Y1), B)[1], -0.072248)


def test_eaft():
    near(F.eaft_loss(A, Y0) / F.cross_entropy_loss(A, Y0), 0.692979)
    near((1 - smoothing.adaptive_alpha(A, 0.5)) / 0.5, 0.692979)
    near(F.eaft_loss(B, Y1), 2.038149)
    near(gradient(lambda z: F.eaft_loss(z, Y0), A)[0], -0.250812)
    raw = F.eaft_loss(A, Y0, top_k=2, normalizer=None)
    near(raw / F.cross_entropy_loss(A, Y0), 0.582203)
    near(F.eaft_loss(A, Y0, top_k=2), 0.377397)
    near(F.eaft_loss(A, Y0, normalizer=3.0), 0.143881)


def test_z_loss():
    near(F.z_loss(A, Y0, lam=1.0).sqrt(), 2.449313)
    near(F.cross_entropy_loss(A, Y0) + F.z_loss(A, Y0), 0.449913)

    def with_z(loss, z, y):
        return loss(z, y) + F.z_loss(z, y, lam=0.01)

    near(with_z(F.cross_entropy_loss, A, Y0), 0.509304)
    near(with_z(F.cross_entropy_loss, B, Y1), 2.587868)
    near(gradient(lambda z: with_z(F.cross_entropy_loss, z, Y0), A)[0], -0.330677)
    near(gradient(lambda z: with_z(F.labo_loss, z, Y0), A)[0], -0.048741)


def test_focal():
    near(F.focal_loss(A, Y0, gamma=1), 0.162621)
    near(F.focal_loss(B, Y1, gamma=1), 2.346414)
    near(F.focal_loss(A, Y0, gamma=2), 0.058858)
    near(F.focal_loss(B, Y1, gamma=2), 2.162469)
    near(gradient(lambda z: F.focal_loss(z, Y0, gamma=2), A)[0], -0.122523)
    near(gradient(lambda z: F.focal_loss(z, Y0, gamma=2, detach_factor=True), A)[0], -0.047412)


def test_anti_focal():
    near(F.anti_focal_loss(A, Y0), 0.592659)
    near(F.anti_focal_loss(B, Y1), 2.645802)
    near(F.anti_focal_loss(A, Y0, scale=1), 0.736005)
    near(gradient(lambda z: F.anti_focal_loss(z, Y0), A)[0], -0.477402)
    near(gradient(lambda z: F.anti_focal_loss(z, Y0, detach_factor=False), A)[0], -0.425521)


def test_generalized_entropy():
    def ger(**hyper):
        return F.generalized_entropy_loss(A, Y0, **hyper)

    near(ger(alpha=0.5, beta=1.0) - 0.449313, 0.439719)
    near(ger(alpha=0.5, beta=0.7), 0.757116)
    near(ger(alpha=0.5, beta=0.7) + 0.7 * math.log(4) / 0.5, 2.697928)
    near(ger(alpha=0.5, beta=1.0) - 0.449313 + math.log(4) / 0.5, 3.212308)
    near(ger(alpha=0.0, beta=1.0) - 0.449313, 0.425622)
    near(ger(alpha=1.0, beta=1.0) - 0.449313, 0.538019)


def test_strength_of_max_suppression_grows_to_the_last_epoch():
    logits, target = batch(6, 6, 5)
    loss = labo.MaxSuppressionLoss(lam=0.1, final_lam=0.2, epochs=3)
    for lam in (0.1, 0.15, 0.2, 0.2):
        expected = F.max_suppression_loss(logits, target, lam=lam)
        torch.testing.assert_close(loss(logits, target), expected)
        fused = loss(logits.float().requires_grad_(), target)
        assert is_fused(fused)
        torch.testing.assert_close(fused.double(), expected, rtol=1e-6, atol=1e-6)
        loss.end_epoch()
    fresh = labo.MaxSuppressionLoss(lam=0.1, final_lam=0.2, epochs=3)
    fresh.load_state_dict(loss.state_dict())
    assert fresh.epoch == 4
    with pytest.raises(ValueError, match="final_lam needs epochs"):
        labo.MaxSuppressionLoss(final_lam=0.2)


@pytest.mark.parametrize("weight", [None, torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0]).double()])
def test_z_loss_with_ignored_rows_masks_and_weights(weight):
    logits, target = batch(6, 6, 5)
    logits[:, 3] = -math.inf
    logits[2] = math.nan
    target[2] = -100
    rows = [0, 1, 3, 4, 5]
    w = torch.ones(5, dtype=torch.float64) if weight is None else weight
    z = logits[rows].logsumexp(-1)
    case = LossCase("z", F.z_loss, {"lam": 0.3, "weight": weight})
    value, slope = both(case, logits, target)
    expected = (w[target[rows]] * 0.3 * z**2).sum() / w[target[rows]].sum()
    torch.testing.assert_close(value, expected)
    assert slope.isfinite().all()
    assert slope[:, 3].count_nonzero() == slope[2].count_nonzero() == 0
    leaf = logits[rows][:, [0, 1, 2, 4]].requires_grad_()
    labels = target[rows].masked_fill(target[rows] > 2, 0)
    assert torch.autograd.gradcheck(lambda z: F.z_loss(z, labels, lam=0.3), (leaf,))


def test_z_loss_is_of_the_shift_alone():
    """At any probabilities the logits with log-sum-exp 0 cost nothing."""
    logits, target = batch(6, 6, 5)
    assert F.z_loss(logits.log_softmax(-1), target).item() == pytest.approx(0, abs=1e-30)
    assert F.z_loss(logits.half(), target).dtype == torch.float32
    torch.testing.assert_close(
        F.z_loss(logits[:, :1], target * 0), 1e-4 * logits[:, 0].square().mean()
    )


def test_generalized_entropy_at_alpha_0_needs_a_positive_prior():
    """KL(p || u) is infinite where the prior is 0; its gradient would be NaN."""
    logits, target = batch(6, 5, 4)
    prior = torch.tensor([0.5, 0.0, 0.25, 0.25], dtype=torch.float64)
    with pytest.raises(ValueError, match="at alpha=0 the prior must be above 0 for every class"):
        F.generalized_entropy_loss(logits, target, alpha=0, prior=prior)
    for alpha in (1e-3, 0.5, 1.0):
        slope = gradient(
            lambda z, a=alpha: F.generalized_entropy_loss(z, target, alpha=a, prior=prior), logits
        )
        assert slope.isfinite().all()
    F.generalized_entropy_loss(logits, target, alpha=0, prior=prior, generator="euclidean")


def test_generalized_entropy_at_alpha_0_with_a_masked_class():
    """A class that is masked may have a prior of 0; in ignored rows nothing is checked."""
    logits, target = batch(6, 5, 4)
    prior = torch.tensor([0.5, 0.0, 0.25, 0.25], dtype=torch.float64)
    logits[:, 1] = -math.inf
    target = target.masked_fill(target == 1, 2)
    logits[2, 1], target[2] = 0.3, -100
    slope = gradient(lambda z: F.generalized_entropy_loss(z, target, alpha=0, prior=prior), logits)
    assert slope.isfinite().all()
    keep, rows = [0, 2, 3], [0, 1, 3, 4]
    expected = gradient(
        lambda z: F.generalized_entropy_loss(
            z, (target - (target > 1).long())[rows], alpha=0, prior=prior[keep]
        ),
        logits[rows][:, keep],
    )
    torch.testing.assert_close(slope[rows][:, keep], expected)


@each_backend
@pytest.mark.parametrize("alpha", [1e-25, 1e-9, 0.3, 0.7, 1 - 1e-9])
@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_generalized_entropy_near_its_ends(alpha, scale, impl):
    """D = KL(U || m) / alpha + KL(p || m) / (1 - alpha), in numbers of 40 digits."""
    decimal.getcontext().prec = 40
    logits = scale * torch.tensor([[1.5, 0.25, -1.0, 0.5, -2.0]])
    z, a = [decimal.Decimal(x) for x in logits[0].tolist()], decimal.Decimal(alpha)
    p = [(x - z[0]).exp() for x in z]
    p = [x / sum(p) for x in p]
    u = decimal.Decimal(1) / len(p)
    m = [(1 - a) * u + a * x for x in p]
    of_u = sum(u * (u / x).ln() for x in m) / a
    of_p = sum(x * (x / y).ln() for x, y in zip(p, m, strict=True)) / (1 - a)
    exact = float(-p[0].ln() + decimal.Decimal("0.7") * (of_u + of_p))
    value = F.generalized_entropy_loss(logits, torch.tensor([0]), alpha=alpha, impl=impl)
    assert float(value) == pytest.approx(exact, rel=1e-6)


def test_generalized_entropy_prior():
    logits, target = batch(6, 5, 4)
    prior = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    p = logits.softmax(-1)
    ce = F.cross_entropy_loss(logits, target, reduction="none")
    for alpha, divergence in (
        (0.0, (p * (p / prior).log()).sum(-1)),
        (1.0, (prior * (prior / p).log()).sum(-1)),
    ):
        value = F.generalized_entropy_loss(
            logits, target, alpha=alpha, beta=0.5, prior=prior, reduction="none"
        )
        torch.testing.assert_close(value, ce + 0.5 * divergence)
        near = min(max(alpha, 1e-6), 1 - 1e-6)
        close = F.generalized_entropy_loss(
            logits, target, alpha=near, beta=0.5, prior=prior, reduction="none"
        )
        torch.testing.assert_close(close, value, atol=1e-4, rtol=0)


# ------------------------------------------------------------------ GEM, GCE, Zipf, ACLS, adaptive


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
