"""The paper's claims, one test each."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

import labo
from conftest import gradient
from labo import functional as F
from labo import smoothing

LOGITS = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2
TARGET = torch.tensor([0, 1, 2, 3, 4, 0])


def objective(p_ls: np.ndarray, logits: torch.Tensor, y: int, alpha: float, beta: float) -> float:
    """R(P_ls) in numpy, straight from Eq. (pseudo-kd)."""
    log_p = logits.log_softmax(-1).numpy()
    p_hat = alpha * p_ls
    p_hat[y] += 1 - alpha
    inside = p_ls > 0
    kl = (p_ls[inside] * np.log(len(p_ls) * p_ls[inside])).sum()
    return float(-(p_hat * log_p).sum() + beta * kl)


@pytest.mark.parametrize(("alpha", "tau"), [(0.1, 1.25), (0.5, 1.15), (0.9, 3.0), (0.3, 0.7)])
def test_theorem_1_against_a_numerical_minimiser(alpha, tau):
    """P* = softmax(z / tau) minimises R over the simplex."""
    for logits, y in zip(LOGITS, TARGET, strict=True):
        found = minimize(
            lambda s, z=logits, y=y: objective(
                np.exp(s - s.max()) / np.exp(s - s.max()).sum(), z, int(y), alpha, alpha * tau
            ),
            np.zeros(5),
            method="BFGS",
            options={"gtol": 1e-10},
        )
        best = torch.softmax(torch.from_numpy(found.x), 0)
        torch.testing.assert_close(best, smoothing.tempered(logits, tau), atol=1e-5, rtol=0)
        value = F.labo_loss(logits, y, alpha=alpha, tau=tau)
        assert value.item() == pytest.approx(found.fun, abs=1e-9)


def test_theorem_1_in_powers_of_p():
    """The theorem's own form, p^(alpha/beta) normalised, is the tempered softmax (Appendix B)."""
    alpha, beta = 0.4, 0.5
    p = LOGITS.softmax(-1) ** (alpha / beta)
    normalised = p / p.sum(-1, keepdim=True)
    torch.testing.assert_close(normalised, smoothing.tempered(LOGITS, beta / alpha))


def test_inner_problem_is_convex():
    """The Hessian in P_ls is diag(beta / P_ls), positive definite for beta > 0."""
    p_ls = smoothing.tempered(LOGITS[0], 2.0)
    beta = 0.6

    def r(x):
        log_p = LOGITS[0].log_softmax(-1)
        return -0.5 * log_p[0] - 0.5 * (x * log_p).sum() + beta * (x * (5 * x).log()).sum()

    hessian = torch.autograd.functional.hessian(r, p_ls)
    torch.testing.assert_close(hessian, torch.diag(beta / p_ls))
    assert torch.linalg.eigvalsh(hessian).min() > 0


def test_remark_1_uniform_smoothing_is_label_smoothing():
    uniform = smoothing.uniform(LOGITS)
    expected = torch.nn.functional.cross_entropy(LOGITS, TARGET, label_smoothing=0.2)
    for beta in (0.0, 0.7):
        value = F.smoothed_cross_entropy(LOGITS, TARGET, uniform, alpha=0.2, beta=beta)
        torch.testing.assert_close(value, expected)


def test_remark_2_a_teacher_gives_distillation():
    teacher = torch.randn(6, 5, dtype=torch.float64)
    alpha = 0.3
    p_t = teacher.softmax(-1)
    value = F.smoothed_cross_entropy(LOGITS, TARGET, p_t, alpha=alpha, beta=alpha)
    kd = F.distillation_loss(LOGITS, TARGET, teacher, alpha=alpha, tau=1.0)
    torch.testing.assert_close(value, kd + alpha * math.log(5))


def test_remark_3_large_beta_is_label_smoothing():
    expected = torch.nn.functional.cross_entropy(LOGITS, TARGET, label_smoothing=0.1)
    value = F.labo_loss(LOGITS, TARGET, alpha=0.1, tau=1e7)
    torch.testing.assert_close(value, expected, atol=1e-6, rtol=0)
    slope = gradient(lambda z: F.labo_loss(z, TARGET, alpha=0.1, tau=1e7), LOGITS)
    smooth = gradient(
        lambda z: torch.nn.functional.cross_entropy(z, TARGET, label_smoothing=0.1), LOGITS
    )
    torch.testing.assert_close(slope, smooth, atol=1e-6, rtol=0)


def test_remark_4_the_optimum_is_a_temperature():
    torch.testing.assert_close(smoothing.tempered(LOGITS, 1.25), (LOGITS / 1.25).softmax(-1))


def test_optimal_smoothing_beats_every_other():
    best = F.labo_loss(LOGITS, TARGET, alpha=0.3, tau=1.25, reduction="none")
    for seed in range(20):
        torch.manual_seed(seed)
        other = torch.distributions.Dirichlet(torch.ones(5, dtype=torch.float64)).sample((6,))
        value = F.smoothed_cross_entropy(
            LOGITS, TARGET, other, alpha=0.3, beta=0.375, reduction="none"
        )
        assert (best <= value + 1e-12).all()


@pytest.mark.parametrize("alpha", [0.1, "adaptive"])
def test_gradient_is_p_minus_p_hat(alpha):
    slope = gradient(lambda z: F.labo_loss(z, TARGET, alpha=alpha, reduction="sum"), LOGITS)
    strength = smoothing.adaptive_alpha(LOGITS) if alpha == "adaptive" else alpha
    p_hat = smoothing.smoothed_target(TARGET, smoothing.tempered(LOGITS), strength)
    torch.testing.assert_close(slope, LOGITS.softmax(-1) - p_hat)


def two_stage(logits: torch.Tensor, alpha: float | torch.Tensor) -> torch.Tensor:
    """The definition with nothing held fixed."""
    p_star = smoothing.tempered(logits, 1.25)
    return F.smoothed_cross_entropy(logits, TARGET, p_star, alpha=alpha, beta=1.25 * alpha)


def test_hypergradient_is_zero_for_constant_alpha():
    whole = gradient(lambda z: two_stage(z, 0.3), LOGITS)
    held = gradient(lambda z: F.labo_loss(z, TARGET, alpha=0.3), LOGITS)
    torch.testing.assert_close(whole, held, atol=1e-14, rtol=0)


def test_hypergradient_is_not_zero_for_adaptive_alpha():
    """The paper's argument stops here: alpha must be detached, or the gradient is another one."""
    whole = gradient(lambda z: two_stage(z, smoothing.adaptive_alpha(z)), LOGITS)
    held = gradient(lambda z: F.labo_loss(z, TARGET), LOGITS)
    assert (whole - held).norm() > 0.05 * held.norm()
    undetached = gradient(lambda z: F.labo_loss(z, TARGET, alpha_grad=True), LOGITS)
    torch.testing.assert_close(whole, undetached)


def test_undetached_alpha_can_push_the_true_class_down():
    sure = torch.tensor([2.0, 1.0, 0.1, -1.0], dtype=torch.float64)
    y = torch.tensor(0)
    assert gradient(lambda z: F.labo_loss(z, y), sure)[0] < 0
    assert gradient(lambda z: F.labo_loss(z, y, alpha_grad=True), sure)[0] > 0


def test_adaptive_alpha_range():
    """From 1 - rho at a uniform prediction to 1 at a certain one."""
    flat, sure = torch.zeros(7), torch.tensor([500.0, 0, 0, 0, 0, 0, 0])
    assert smoothing.adaptive_alpha(flat, rho=0.5).item() == pytest.approx(0.5)
    assert smoothing.adaptive_alpha(sure, rho=0.5).item() == pytest.approx(1.0)
    assert smoothing.adaptive_alpha(flat, rho=1.0).item() == pytest.approx(0.0, abs=1e-6)


def test_algorithm_1_switches_at_the_boundary():
    """Steps 1 .. T_w - 1 are uniform, step T_w is the first with P*."""
    before, after = labo.LabelSmoothingLoss(alpha=0.1), labo.LABOLoss()
    loss = labo.Warmup(before, after, steps=5)
    for i in range(1, 9):
        expected = (before if i < 5 else after)(LOGITS, TARGET)
        assert torch.equal(loss(LOGITS, TARGET), expected), f"step {i}"
        loss.step()


def test_stationary_point_explains_the_papers_histogram():
    """The figure's "around 0.4" is adaptive alpha; alpha = 0.1 would give 0.97, LS gives 0.9."""
    assert smoothing.stationary_confidence(10_000, tau=1.25) == pytest.approx(0.404, abs=5e-4)
    fixed = smoothing.stationary_confidence(10_000, tau=1.25, alpha=0.1)
    assert fixed == pytest.approx(0.974, abs=1e-3)
    ls = smoothing.stationary_confidence(10_000, tau=math.inf, alpha=0.1)
    assert ls == pytest.approx(0.900, abs=5e-4)


def test_training_reaches_the_stationary_point():
    """Gradient descent on the logits of one sample ends where the formula says."""
    logits = torch.zeros(100, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=5.0)
    for _ in range(400):
        optimizer.zero_grad()
        F.labo_loss(logits, torch.tensor(3)).backward()
        optimizer.step()
    expected = smoothing.stationary_confidence(100, tau=1.25)
    assert logits.softmax(0)[3].item() == pytest.approx(expected, abs=1e-6)
