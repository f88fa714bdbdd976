"""The worked numbers of the methods' sources: K = 4, natural log, float64, six decimals.

Each value was computed outside this library, twice. A and B are samples, T a teacher.
"""

from __future__ import annotations

import math

import pytest
import torch

import labo
from conftest import LOSS_CASES, LossCase, gradient
from labo import functional as F
from labo import smoothing

A = torch.tensor([2.0, 1.0, 0.1, -1.0], dtype=torch.float64)
B = torch.tensor([0.5, -0.5, 1.5, 0.0], dtype=torch.float64)
T = torch.tensor([3.0, 1.0, 0.2, -0.5], dtype=torch.float64)
Y0, Y1 = torch.tensor(0), torch.tensor(1)
BATCH, TARGETS = torch.stack([A, B]), torch.tensor([0, 1])


def near(value: torch.Tensor | float | list, expected: float | list) -> None:
    torch.testing.assert_close(
        torch.as_tensor(value, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        atol=6e-7,
        rtol=0,
    )


WORKED = [case for case in LOSS_CASES if case.worked is not None]


@pytest.mark.parametrize("case", WORKED, ids=lambda case: case.name)
def test_the_worked_number_of_a_case(case: LossCase):
    near(case(A, Y0), case.worked)


def test_basics():
    near(A.softmax(-1), [0.638066, 0.234731, 0.095435, 0.031767])
    near(F.cross_entropy_loss(A, Y0), 0.449313)
    near(F.cross_entropy_loss(B, Y1), 2.546006)
    near(F.cross_entropy_loss(BATCH, TARGETS), 1.497660)


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

        def two_stage(z, *, alpha, beta):
            return F.smoothed_cross_entropy(
                z, Y0, smoothing.tempered(z, 1.25), alpha=alpha, beta=beta
            )

        near(gradient(lambda z: two_stage(z, alpha=0.1, beta=0.125), A)[0], -0.318792)
        near(gradient(lambda z: two_stage(z, alpha=0.1, beta=0.0), A)[0], -0.348199)
        near(gradient(lambda z: F.labo_loss(z, Y0, alpha_grad=True), A)[0], 0.040873)

        def all_in_graph(z):
            alpha = smoothing.adaptive_alpha(z)
            return two_stage(z, alpha=alpha, beta=1.25 * alpha)

        near(gradient(all_in_graph, A)[0], 0.040873)

    def test_mixed_label(self):
        mixed = torch.tensor([0.7, 0.0, 0.3, 0.0], dtype=torch.float64)
        near(F.cross_entropy_loss(A, mixed), 1.019313)
        alpha = smoothing.adaptive_alpha(A)
        p_hat = smoothing.smoothed_target(mixed, smoothing.tempered(A), alpha)
        near(F.cross_entropy_loss(A, p_hat), 1.069306)
        two = 0.7 * F.labo_loss(A, Y0) + 0.3 * F.labo_loss(A, torch.tensor(2))
        near(F.labo_loss(A, mixed), two.item())


def test_label_smoothing():
    near(F.label_smoothing_loss(A, Y0), 0.596813)
    near(F.label_smoothing_loss(B, Y1), 2.458506)
    near(F.label_smoothing_loss(A, Y0, convention="fairseq"), 0.645980)
    near(F.label_smoothing_loss(B, Y1, convention="fairseq"), 2.429340)
    near(F.label_smoothing_loss(A, Y0, alpha=0.1 * 4 / 3), 0.645980)


def test_confidence_penalty():
    near(F.confidence_penalty_loss(A, Y0, beta=0.1), 0.353246)
    near(F.confidence_penalty_loss(B, Y1, beta=0.1), 2.435030)
    slope = gradient(lambda z: F.confidence_penalty_loss(z, Y0, beta=0.1), A)
    near(slope, [-0.329306, 0.223262, 0.082182, 0.023862])


def test_confidence_penalty_threshold_costs_low_entropy():
    h = 0.960673
    near(F.confidence_penalty_loss(A, Y0, beta=0.1, threshold=0.5), 0.449313)
    near(F.confidence_penalty_loss(A, Y0, beta=0.1, threshold=1.2), 0.449313 + 0.1 * (1.2 - h))


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


def test_distillation():
    near(F.distillation_loss(A, Y0, T, alpha=1.0, tau=4), 0.094983)
    near(F.distillation_loss(A, Y0, T, alpha=0.9, tau=4), 0.130416)
    near(F.distillation_loss(A, Y0, T, kl_reduction="elementwise"), 0.066302)
    near(F.distillation_loss(A, Y0, T, alpha=0.5, tau=1), 0.263647)


def test_remark_2_identity():
    """KD at temperature 1 is the objective at the teacher, up to exactly alpha log K."""
    p_t = T.softmax(-1)
    value = F.smoothed_cross_entropy(A, Y0, p_t, alpha=0.5, beta=0.5) - 0.5 * math.log(4)
    near(value, 0.263647)


def test_tf_kd_self():
    value = F.distillation_loss(
        A, Y0, T, alpha=0.95, tau=6, kl_reduction="elementwise", multiplier=50
    )
    near(value, 1.090534)


def test_word_level_distillation():
    near(F.smoothed_cross_entropy(A, Y0, T.softmax(-1), alpha=0.5), 0.588535)
    selective = F.label_smoothing_loss(A, Y0) + F.distillation_loss(A, Y0, T, alpha=1.0, tau=1)
    near(selective, 0.674793)


def test_tf_reg():
    near(smoothing.virtual_teacher(A, Y0, tau=20)[0], 0.259364)
    near(F.tf_reg_loss(A, Y0, alpha=1.0, tau=20), 0.519835)
    near(F.tf_reg_loss(A, Y0, alpha=0.1, tau=20, multiplier=100), 1.703970)
    near(F.tf_reg_loss(A, Y0, alpha=0.95, tau=40, multiplier=1), 0.148085)
    near(F.tf_reg_loss(A, Y0, alpha=0.1, tau=20), 0.456365)
    near(F.tf_reg_loss(A, Y0, alpha=0.1, tau=20, mode="paper"), 0.404466)


def test_tf_reg_virtual_teacher_at_100_classes():
    teacher = smoothing.virtual_teacher(torch.zeros(100, dtype=torch.float64), Y0, tau=20)
    near(teacher[:2], [0.010502, 0.009995])


def test_cs_kd():
    near(F.cs_kd_loss(A, Y0, T), 0.544296)
    near(F.cs_kd_loss(A, Y0, T, lam=3), 0.734261)


def test_beta_smoothing():
    draw = torch.tensor(0.8, dtype=torch.float64)
    near(F.beta_smoothing_loss(A, Y0, A, alpha=1.0, draws=draw), 0.842646)
    near(F.beta_smoothing_loss(A, Y0, A, alpha=0.6, draws=draw), 0.685313)


def test_beta_smoothing_batch():
    confidence = torch.tensor([0.9, 0.3], dtype=torch.float64)
    rest = (1 - confidence) / 3
    ema = rest.unsqueeze(-1).repeat(1, 4).scatter(1, TARGETS[:, None], confidence[:, None])
    for order in ([0.95, 0.55], [0.55, 0.95]):
        draws = torch.tensor(order, dtype=torch.float64)
        near(F.beta_smoothing_loss(BATCH, TARGETS, ema.log(), draws=draws), 1.369660)


def test_self_distillation_teacher_temperature_only():
    value = F.smoothed_cross_entropy(A, Y0, smoothing.tempered(T, 4.0), alpha=0.4)
    near(value, 0.893861)


def test_kr_ls():
    table = torch.zeros(4, 4, dtype=torch.float64)
    table[0, 1:] = torch.tensor([0.2, -0.1, 0.0])
    near(F.kr_ls_loss(A, Y0, table, alpha=0.5), 0.544621)
    near((F.kr_ls_loss(A, Y0, table, alpha=1.0) - 0.449313), 0.190616)
    qp = F.kr_ls_loss(A, Y0, table, alpha=1.0, order="qp") - 0.449313
    near(qp, 0.242619)
    slope = gradient(lambda z: F.kr_ls_loss(z, Y0, table, alpha=0.5), A)
    near(slope[:2], [-0.361934, 0.337266])
    learned = gradient(lambda s: F.kr_ls_loss(A, Y0, s, alpha=0.5), table)
    near(learned[0, 1], -0.146399)
    assert learned[1:].count_nonzero() == 0
    assert learned[0, 0] == 0
    near(F.kr_ls_loss(A, Y0, torch.zeros(4, 4), alpha=1.0) - 0.449313, 0.252739)


def test_ps_kd():
    past = torch.tensor([0.7, 0.2, 0.06, 0.04], dtype=torch.float64)
    near(F.ps_kd_loss(A, Y0, past.log(), alpha=0.4), 0.622913)
    loss = labo.PSKDLoss(epochs=300, alpha=0.8)
    for _ in range(149):
        loss.end_epoch()
    near(loss(A, Y0, past.log()), 0.622913)


def test_online_label_smoothing():
    table = torch.full((4, 4), 0.25, dtype=torch.float64)
    table[0] = torch.tensor([0.85, 0.10, 0.03, 0.02])

    def ols(table, hard, soft):
        return F.online_label_smoothing_loss(A, Y0, table, hard_weight=hard, soft_weight=soft)

    near(ols(table, 0.0, 1.0), 0.666313)
    near(ols(table, 0.5, 0.5), 0.557813)
    near(ols(table, 1.0, 1.0), 1.115626)
    near(ols(torch.zeros(4, 4), 0.5, 0.5), 0.224657)
    near(ols(torch.full((4, 4), 0.25), 1.0, 1.0), 2.373626)


def test_online_label_smoothing_update():
    loss = labo.OnlineLabelSmoothingLoss(4).double()
    second = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
    loss(torch.stack([A, second, B]), torch.tensor([0, 0, 1]))
    loss.end_epoch()
    near(loss.table[0], [0.556717, 0.204805, 0.135156, 0.103323])
    near(loss.table[1], [0.25] * 4)


def test_generalized_entropy():
    def ger(**hyper):
        return F.generalized_entropy_loss(A, Y0, **hyper)

    near(ger(alpha=0.5, beta=1.0) - 0.449313, 0.439719)
    near(ger(alpha=0.5, beta=0.7), 0.757116)
    near(ger(alpha=0.5, beta=0.7) + 0.7 * math.log(4) / 0.5, 2.697928)
    near(ger(alpha=0.0, beta=1.0) - 0.449313, 0.425622)
    near(ger(alpha=1.0, beta=1.0) - 0.449313, 0.538019)


def test_masked_label_smoothing():
    mask = torch.tensor([True, True, False, True])
    near(F.masked_label_smoothing_loss(A, Y0, mask), 0.649313)
    label = torch.tensor([0.9, 0.05, 0.0, 0.05], dtype=torch.float64)
    near(F.cross_entropy_loss(A, label), 0.649313)


def test_weighted_label_smoothing():
    groups = torch.tensor([0, 0, 2, 1])
    near(F.weighted_label_smoothing_loss(A, Y0, groups, normalize=False), 0.618327)
    near(F.weighted_label_smoothing_loss(A, Y0, groups), 0.618327 / 0.98)
