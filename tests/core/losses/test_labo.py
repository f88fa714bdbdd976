"""LABO: the paper's claims one by one, the worked numbers, and the warmup."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from scipy.optimize import minimize

import labo
from labo import functional as F
from labo import smoothing
from loss_cases import gradient
from worked import BATCH, TARGETS, Y0, Y1, A, B, T, near

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
        minimum = minimize(
            lambda s, z=logits, y=y: objective(
                np.exp(s - s.max()) / np.exp(s - s.max()).sum(), z, int(y), alpha, alpha * tau
            ),
            np.zeros(5),
            method="BFGS",
            options={"gtol": 1e-10},
        )
        best = torch.softmax(torch.from_numpy(minimum.x), 0)
        torch.testing.assert_close(best, smoothing.tempered(logits, tau), atol=1e-5, rtol=0)
        value = F.labo_loss(logits, y, alpha=alpha, tau=tau)
        assert value.item() == pytest.approx(minimum.fun, abs=1e-9)


def test_theorem_1_in_powers_of_p():
    """The theorem's own form, p^(alpha/beta) normalised, is the tempered softmax (Appendix B)."""
    alpha, beta = 0.4, 0.5
    p = LOGITS.softmax(-1) ** (alpha / beta)
    normalised = p / p.sum(-1, keepdim=True)
    torch.testing.assert_close(normalised, smoothing.tempered(LOGITS, beta / alpha))


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
    value = F.smoothed_cross_entropy(A, Y0, T.softmax(-1), alpha=0.5, beta=0.5)
    near(value - 0.5 * math.log(4), 0.263647)


def test_remark_3_large_beta_is_label_smoothing():
    expected = torch.nn.functional.cross_entropy(LOGITS, TARGET, label_smoothing=0.1)
    value = F.labo_loss(LOGITS, TARGET, alpha=0.1, tau=1e7)
    torch.testing.assert_close(value, expected, atol=1e-6, rtol=0)
    slope = gradient(lambda z: F.labo_loss(z, TARGET, alpha=0.1, tau=1e7), LOGITS)
    smooth = gradient(
        lambda z: torch.nn.functional.cross_entropy(z, TARGET, label_smoothing=0.1), LOGITS
    )
    torch.testing.assert_close(slope, smooth, atol=1e-6, rtol=0)


def two_stage(logits, target, alpha, tau=1.25):
    """The definition with nothing held fixed."""
    p_star = smoothing.tempered(logits, 1.25)
    return F.smoothed_cross_entropy(logits, target, p_star, alpha=alpha, beta=alpha * tau)


def test_hypergradient_is_zero_for_constant_alpha():
    whole = gradient(lambda z: two_stage(z, TARGET, 0.3), LOGITS)
    held = gradient(lambda z: F.labo_loss(z, TARGET, alpha=0.3), LOGITS)
    torch.testing.assert_close(whole, held, atol=1e-14, rtol=0)


def test_hypergradient_is_not_zero_for_adaptive_alpha():
    """The paper's argument stops here: alpha must be detached, or the gradient is another one."""
    whole = gradient(lambda z: two_stage(z, TARGET, smoothing.adaptive_alpha(z)), LOGITS)
    held = gradient(lambda z: F.labo_loss(z, TARGET), LOGITS)
    assert (whole - held).norm() > 0.05 * held.norm()
    undetached = gradient(lambda z: F.labo_loss(z, TARGET, alpha_grad=True), LOGITS)
    torch.testing.assert_close(whole, undetached)


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
    for steps in (0, 1):
        assert labo.Warmup(before, after, steps=steps).active is after


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


LABO_TABLE = {
    ("A", 1.15): (0.751537, 0.593684, 0.734468, 0.838893, 0.260414, 1.099307, -0.096402),
    ("A", 1.25): (0.816888, 0.568583, 0.718064, 0.871807, 0.248732, 1.120539, -0.079998),
    ("B", 1.15): (0.689697, 0.094136, 0.456721, 1.724955, 0.147413, 1.872368, -0.378327),
    ("B", 1.25): (0.749670, 0.103408, 0.462282, 1.747372, 0.136844, 1.884216, -0.383887),
}


class TestLABO:
    @pytest.mark.parametrize(("sample", "tau"), LABO_TABLE)
    def test_table(self, sample, tau):
        z, y = {"A": (A, Y0), "B": (B, Y1)}[sample]
        beta, p_star_y, p_hat_y, ce, kl, value, slope = LABO_TABLE[sample, tau]
        alpha = smoothing.adaptive_alpha(z)
        p_star = smoothing.tempered(z, tau)
        p_hat = smoothing.smoothed_target(y, p_star, alpha)
        near(alpha * tau, beta)
        near(p_star[y], p_star_y)
        near(p_hat[y], p_hat_y)
        near(F.cross_entropy_loss(z, p_hat), ce)
        near(alpha * tau * (p_star * (4 * p_star).log()).sum(), kl)
        near(F.labo_loss(z, y, tau=tau), value)
        near(gradient(lambda x: F.labo_loss(x, y, tau=tau), z)[y], slope)
        near(F.smoothed_cross_entropy(z, y, p_star, alpha=alpha, beta=alpha * tau), value)

    def test_alpha(self):
        near(smoothing.adaptive_alpha(A), 0.653511)
        near(smoothing.adaptive_alpha(B), 0.599736)

    def test_batch_mean(self):
        near(F.labo_loss(BATCH, TARGETS), 1.502377)
        p_hat = smoothing.smoothed_target(
            TARGETS, smoothing.tempered(BATCH), smoothing.adaptive_alpha(BATCH)
        )
        near(F.cross_entropy_loss(BATCH, p_hat), 1.309589)

    def test_fixed_alpha(self):
        near(F.labo_loss(A, Y0, alpha=0.1), 0.552024)
        p_star = smoothing.tempered(A, 1.25)
        near(F.smoothed_cross_entropy(A, Y0, p_star, alpha=0.1), 0.513963)

    def test_the_four_gradients(self):
        """Detached or not: the same for constant alpha, another sign for adaptive alpha."""
        near(gradient(lambda z: F.labo_loss(z, Y0, alpha=0.1), A)[0], -0.318792)
        near(gradient(lambda z: two_stage(z, Y0, 0.1), A)[0], -0.318792)
        near(gradient(lambda z: two_stage(z, Y0, 0.1, tau=0.0), A)[0], -0.348199)
        near(gradient(lambda z: F.labo_loss(z, Y0, alpha_grad=True), A)[0], 0.040873)
        near(gradient(lambda z: two_stage(z, Y0, smoothing.adaptive_alpha(z)), A)[0], 0.040873)

    def test_mixed_label(self):
        mixed = torch.tensor([0.7, 0.0, 0.3, 0.0], dtype=torch.float64)
        near(F.cross_entropy_loss(A, mixed), 1.019313)
        alpha = smoothing.adaptive_alpha(A)
        p_hat = smoothing.smoothed_target(mixed, smoothing.tempered(A), alpha)
        near(F.cross_entropy_loss(A, p_hat), 1.069306)
        two = 0.7 * F.labo_loss(A, Y0) + 0.3 * F.labo_loss(A, torch.tensor(2))
        near(F.labo_loss(A, mixed), two.item())


def test_labo_with_several_outer_steps():
    """Free logits, z <- z - gradient. The held label is the limit; a fresh one moves."""
    held, fresh = A, A
    values, slopes, fresh_values, fresh_slopes = [], [], [], []
    for _ in range(4):
        slope = gradient(lambda z: F.held_labo_loss(z, Y0, A), held)
        values.append(F.held_labo_loss(held, Y0, A))
        slopes.append(slope[0])
        held = held - slope
        slope = gradient(lambda z: F.labo_loss(z, Y0), fresh)
        fresh_values.append(F.labo_loss(fresh, Y0))
        fresh_slopes.append(slope[0])
        fresh = fresh - slope
    near(values[:2], [1.120539, 1.111326])
    near(slopes[:2], [-0.079998, -0.051184])
    near(fresh_values[:2], [1.120539, 1.124681])
    near(fresh_slopes[:2], [-0.079998, -0.061475])
    near(held.softmax(-1)[0], 0.703797)
    p_hat = smoothing.smoothed_target(Y0, smoothing.tempered(A), smoothing.adaptive_alpha(A))
    near(p_hat[0], 0.718064)
    near(F.held_labo_loss(p_hat.log(), Y0, A), 1.103665)


def test_held_labo_of_its_own_prediction_is_labo():
    for alpha in ("adaptive", 0.3):
        expected = F.labo_loss(BATCH, TARGETS, alpha=alpha, reduction="none")
        near(F.held_labo_loss(BATCH, TARGETS, BATCH, alpha=alpha, reduction="none"), expected)
        loss = labo.HeldLABOLoss(alpha=alpha, reduction="none")
        assert torch.equal(loss(BATCH, TARGETS), expected)
        near(loss(BATCH, TARGETS, BATCH), expected)
    x, weight = torch.randn(5, 3), torch.randn(4, 3)
    target = torch.tensor([0, 3, 1, 1, 2])
    loss = labo.HeldLABOLoss()
    by_head = labo.linear_loss(x, weight, target, loss, teacher_logits=(x.flip(0), weight + 1))
    expected = loss(x @ weight.T, target, x.flip(0) @ (weight + 1).T)
    torch.testing.assert_close(by_head, expected)


def test_warmup_counts_steps_and_resumes():
    def make():
        return labo.Warmup(labo.LabelSmoothingLoss(), labo.LABOLoss(), steps=4)

    loss = make()
    loss.step()
    loss.step()
    assert loss.active is loss.before
    resumed = make()
    resumed.load_state_dict(loss.state_dict())
    assert resumed.steps_done == 2
    resumed.step()
    assert resumed.active is resumed.after
    assert "steps=4, steps_done=3" in repr(resumed)


def test_warmup_compiles_at_most_twice():
    logits, target = LOGITS, TARGET
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    loss = labo.Warmup(labo.LabelSmoothingLoss(), labo.LABOLoss(), steps=4)
    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for _ in range(8):
        torch.testing.assert_close(compiled(logits, target), loss.active(logits, target))
        loss.step()
    assert counter.frame_count == 2


def test_warmup_passes_teacher_logits_to_the_loss_that_takes_them():
    logits, target = LOGITS, TARGET
    loss = labo.Warmup(labo.LabelSmoothingLoss(), labo.DistillationLoss(), steps=2)
    teacher = logits.sin()
    assert torch.equal(loss(logits, target, teacher), loss.before(logits, target))
    loss.step()
    assert torch.equal(loss(logits, target, teacher), loss.after(logits, target, teacher))
    with pytest.raises(TypeError, match="DistillationLoss needs teacher_logits"):
        loss(logits, target)
    draws = torch.linspace(0.1, 0.9, 6)
    loss = labo.Warmup(labo.LabelSmoothingLoss(), labo.BetaSmoothingLoss(), steps=0)
    expected = loss.after(logits, target, teacher, draws)
    assert torch.equal(loss(logits, target, teacher, draws), expected)


def test_stationary_point_explains_the_papers_histogram():
    """The figure's "around 0.4" is adaptive alpha; alpha = 0.1 would give 0.97, LS gives 0.9."""
    assert smoothing.stationary_confidence(10_000, tau=1.25) == pytest.approx(0.404, abs=5e-4)
    fixed = smoothing.stationary_confidence(10_000, tau=1.25, alpha=0.1)
    assert fixed == pytest.approx(0.974, abs=1e-3)
    ls = smoothing.stationary_confidence(10_000, tau=math.inf, alpha=0.1)
    assert ls == pytest.approx(0.900, abs=5e-4)
