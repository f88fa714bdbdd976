"""Losses with a table or a network of their own: OLS, KR-LS, ConNet-LS."""

from __future__ import annotations

import math

import pytest
import torch

import labo
from labo import functional as F
from loss_cases import gradient
from worked import BATCH, TARGETS, Y0, A, B, near

K = 6


def batch():
    torch.manual_seed(1)
    return torch.randn(8, K, dtype=torch.float64), torch.randint(K, (8,))


def test_ols_evaluation_leaves_the_table_alone():
    logits, target = batch()
    loss = labo.OnlineLabelSmoothingLoss(K).eval()
    loss(logits, target)
    assert loss.counts.sum() == 0
    loss.train()
    loss(logits, logits.softmax(-1))  # mixed labels: used, not gathered
    assert loss.counts.sum() == 0


def test_ols_gathers_only_right_rows_that_count():
    logits = torch.eye(K, dtype=torch.float64) * 5
    target = torch.arange(K)
    target[1], target[2] = -100, 3
    loss = labo.OnlineLabelSmoothingLoss(K)
    loss(logits, target)
    assert loss.counts.tolist() == [1, 0, 0, 1, 1, 1]
    loss.end_epoch()
    torch.testing.assert_close(loss.table.sum(-1), torch.ones(K))
    torch.testing.assert_close(loss.table[1], torch.full((K,), 1 / K))
    assert loss.counts.sum() == 0
    loss.end_epoch()  # only the last epoch counts
    torch.testing.assert_close(loss.table, torch.full((K, K), 1 / K))


def test_ols_keeps_a_frozen_row_until_an_epoch_without_a_correct_prediction_of_it():
    """Then it becomes uniform, as in the authors' code, and as rows that are not frozen."""
    loss = labo.OnlineLabelSmoothingLoss(2, first_table="uniform", freeze_above=0.88)
    assert loss.table.tolist() == [[0.5, 0.5], [0.5, 0.5]]

    def epoch(logits, target):
        loss(torch.tensor(logits), torch.tensor(target))
        loss.end_epoch()
        return loss.table.clone()

    first = epoch([[9.0, 0.0], [0.0, 0.5]], [0, 1])
    second = epoch([[0.1, 0.0], [0.0, 9.0]], [0, 1])
    assert torch.equal(second[0], first[0])
    assert not torch.equal(second[1], first[1])
    third = epoch([[9.0, 0.0], [0.0, 9.0]], [1, 1])  # class 0 does not occur
    assert third[0].tolist() == [0.5, 0.5]
    assert third[1, 1] > 0.99
    fourth = epoch([[9.0, 0.0], [0.0, 9.0]], [1, 0])  # both classes are predicted wrongly
    assert fourth.tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_ols_table_in_use_survives_the_end_of_the_epoch():
    """backward() after end_epoch() still sees the table of its own forward pass."""
    logits, target = batch()
    loss = labo.OnlineLabelSmoothingLoss(K, first_table="uniform")
    expected = gradient(lambda z: loss(z, target), logits)
    leaf = logits.clone().requires_grad_()
    value = loss(leaf, target)
    loss.end_epoch()
    value.backward()
    torch.testing.assert_close(leaf.grad, expected)


def test_kr_ls_table_learns():
    """Gradient steps on the table bring q_res to the p_res of its class."""
    torch.manual_seed(0)
    loss = labo.KRLSLoss(K, alpha=1.0)
    logits, target = torch.randn(1, K), torch.tensor([2])
    optimizer = torch.optim.SGD(loss.parameters(), lr=1.0)
    for _ in range(2000):
        optimizer.zero_grad()
        loss(logits, target).backward()
        optimizer.step()
    others = [0, 1, 3, 4, 5]
    torch.testing.assert_close(
        loss.table[2, others].softmax(-1), logits[0, others].softmax(-1), atol=1e-4, rtol=0
    )


def test_connet_price_falls_and_eval_mode_trusts_nothing():
    logits, target = batch()
    states = logits.sin()
    loss = labo.ConNetLoss(K, lam=2.0, decay_steps=3.0, trust=1.0)
    confidence, trusted, mean = loss.confidences(target, states)
    assert trusted.all()
    torch.testing.assert_close(mean, confidence.sigmoid().mean())
    for step in range(3):
        expected = F.connet_loss(
            logits, target, confidence, trusted=trusted, lam=2.0 * math.exp(-step / 3)
        )
        torch.testing.assert_close(loss(logits, target, states), expected)
        loss.step()
    resumed = labo.ConNetLoss(K, lam=2.0, decay_steps=3.0, trust=1.0)
    resumed.load_state_dict(loss.state_dict())
    assert torch.equal(resumed(logits, target, states), loss(logits, target, states))
    loss.eval()
    expected = F.connet_loss(logits, target, confidence, lam=2.0 * math.exp(-1))
    torch.testing.assert_close(loss(logits, target, states), expected)


def test_connet_learns_from_rows_that_count_only():
    """Everything gets a gradient; an ignored row changes nothing, not even the mean."""
    logits, target = batch()
    states, ignored = logits.sin(), target.clone()
    ignored[3] = -100
    keep = [0, 1, 2, 4, 5, 6, 7]
    loss = labo.ConNetLoss(K, trust=0.5)
    draws = torch.linspace(0, 1, 8)
    both = []
    for rows, labels in (((slice(None)), ignored), (keep, target[keep])):
        states.requires_grad_().grad = None
        loss.zero_grad()
        value = loss(logits[rows], labels, states[rows], draws[rows])
        value.backward()
        both.append((value.detach(), states.grad[keep].clone(), loss.network.weight.grad.clone()))
    torch.testing.assert_close(*both)
    assert both[0][1].any(-1).all()
    assert both[0][2].any()


@pytest.mark.parametrize("states", [None, torch.zeros(3, K)])
def test_connet_names_missing_states(states):
    logits, target = batch()
    with pytest.raises(ValueError, match="ConNetLoss needs states: hidden states of the model"):
        labo.ConNetLoss(K)(logits, target, states)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_table_of_ols_survives_a_cast_to_half(dtype):
    """3,000 samples of one class: a counter in half precision would stop at 2048 or at 256."""
    logits, target = torch.tensor([[3.0, 1.0, 0.0]] * 3), torch.tensor([0] * 3)
    losses = [labo.OnlineLabelSmoothingLoss(3), labo.OnlineLabelSmoothingLoss(3).to(dtype)]
    for loss in losses:
        for _ in range(1000):
            loss(logits, target)
        assert loss.counts[0] == 3000
        loss.end_epoch()
    torch.testing.assert_close(losses[1].table, losses[0].table)


def test_ols_counts_beyond_what_float32_can():
    loss = labo.OnlineLabelSmoothingLoss(2)
    loss.counts[0] = 2**24
    loss(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    assert loss.counts[0] == 2**24 + 1


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


def test_connet():
    c = torch.tensor([0.9, 0.5], dtype=torch.float64)
    near(0.1 * (1 - c / 0.7).exp(), [0.075148, 0.133071])
    near(F.connet_loss(BATCH, TARGETS, c.logit(), lam=0, reduction="none"), [0.553994, 0.811268])
    without = F.connet_loss(BATCH, TARGETS, c.logit(), lam=0, reduction="sum")
    near(F.connet_loss(BATCH, TARGETS, c.logit(), lam=1, reduction="sum") - without, 0.798508)
    near(30 * math.exp(-3000 / 30_000), 27.145123)
    loss = labo.ConNetLoss(1, reduction="sum").eval()
    torch.nn.init.ones_(loss.network.weight)
    torch.nn.init.zeros_(loss.network.bias)
    loss.steps += 3000
    near(loss(BATCH, TARGETS, c.logit().unsqueeze(-1)), 23.040851)


def test_connet_with_trust_is_label_smoothing_of_the_confidence():
    """Trusted rows of equal confidence: fairseq's label smoothing, plus the price."""
    u = torch.zeros(2, dtype=torch.float64)
    value = F.connet_loss(BATCH, TARGETS, u, lam=0, trusted=torch.ones(2, dtype=torch.bool))
    near(value, F.label_smoothing_loss(BATCH, TARGETS, alpha=0.1, convention="fairseq"))
