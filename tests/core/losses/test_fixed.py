"""Label smoothing and its relatives with a fixed distribution."""

from __future__ import annotations

import pytest
import torch

from labo import functional as F
from labo import smoothing
from loss_cases import LossCase, batch, both
from worked import Y0, Y1, A, B, near

WEIGHTS = [None, torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0], dtype=torch.float64)]
LOGITS, TARGET = batch(0, 7, 11)


def test_label_smoothing():
    near(F.label_smoothing_loss(B, Y1), 2.458506)
    near(F.label_smoothing_loss(A, Y0, convention="fairseq"), 0.645980)
    near(F.label_smoothing_loss(B, Y1, convention="fairseq"), 2.429340)
    near(F.label_smoothing_loss(A, Y0, alpha=0.1 * 4 / 3), 0.645980)


def test_tf_reg():
    near(smoothing.virtual_teacher(A, Y0, tau=20)[0], 0.259364)
    zeros = torch.zeros(100, dtype=torch.float64)
    near(smoothing.virtual_teacher(zeros, Y0, tau=20)[:2], [0.010502, 0.009995])
    near(F.tf_reg_loss(A, Y0, alpha=1.0, tau=20), 0.519835)
    near(F.tf_reg_loss(A, Y0, alpha=0.1, tau=20, multiplier=100), 1.703970)
    near(F.tf_reg_loss(A, Y0, alpha=0.95, tau=40, multiplier=1), 0.148085)
    near(F.tf_reg_loss(A, Y0, alpha=0.1, tau=20), 0.456365)
    near(F.tf_reg_loss(A, Y0, alpha=0.1, tau=20, mode="paper"), 0.404466)


def test_masked_label_smoothing():
    mask = torch.tensor([True, True, False, True])
    near(F.masked_label_smoothing_loss(A, Y0, mask), 0.649313)
    label = torch.tensor([0.9, 0.05, 0.0, 0.05], dtype=torch.float64)
    near(F.cross_entropy_loss(A, label), 0.649313)


def test_weighted_label_smoothing():
    groups = torch.tensor([0, 0, 2, 1])
    near(F.weighted_label_smoothing_loss(A, Y0, groups, normalize=False), 0.618327)
    near(F.weighted_label_smoothing_loss(A, Y0, groups), 0.618327 / 0.98)


@pytest.mark.parametrize("weight", WEIGHTS, ids=["unweighted", "weighted"])
@pytest.mark.parametrize("alpha", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("layout", ["rows", "channels", "probabilities"])
def test_label_smoothing_is_pytorchs(weight, alpha, layout):
    shape = (4, 5, 3, 2) if layout == "channels" else (4, 5)
    logits = torch.randn(shape, dtype=torch.float64)
    target = torch.randint(5, (shape[0], *shape[2:]))
    if layout == "probabilities":
        target = torch.rand(shape, dtype=torch.float64).softmax(-1)
    ours = LossCase("ls", F.label_smoothing_loss, {"alpha": alpha, "dim": -len(shape) + 1})
    theirs = LossCase("ls", torch.nn.functional.cross_entropy, {"label_smoothing": alpha})
    for ignore_index in (-100,) if layout == "probabilities" else (-100, 2):
        if layout != "probabilities":
            target[1] = ignore_index
        for reduction in ("none", "mean", "sum"):
            fixed = {"weight": weight, "ignore_index": ignore_index, "reduction": reduction}
            torch.testing.assert_close(
                both(ours, logits, target, **fixed), both(theirs, logits, target, **fixed)
            )


def test_joeynmt_convention():
    """Parity with JoeyNMT: KL to a label with eps/(V-2) off the target and 0 on padding."""
    pad = 1
    logits, target = LOGITS, TARGET
    target = target.masked_fill(target == pad, 2)
    target[3] = pad
    smooth = torch.full_like(logits, 0.1 / 9).scatter(1, target[:, None], 0.9)
    smooth[:, pad] = 0
    smooth[3] = 0
    kl = torch.nn.functional.kl_div(logits.log_softmax(-1), smooth, reduction="sum")
    label_entropy = -torch.special.xlogy(smooth, smooth).sum()
    value = F.label_smoothing_loss(
        logits,
        target,
        convention="joeynmt",
        padding_idx=pad,
        ignore_index=pad,
        reduction="sum",
    )
    torch.testing.assert_close(value - label_entropy, kl)


def test_fairseq_convention():
    """Parity with fairseq's formula: (1 - eps - eps_i) nll + eps_i sum of -log p."""
    logits, target = LOGITS, TARGET
    log_p = logits.log_softmax(-1)
    eps_i = 0.1 / 10
    nll = -log_p.gather(1, target[:, None]).squeeze(1)
    expected = (1 - 0.1 - eps_i) * nll + eps_i * -log_p.sum(-1)
    value = F.label_smoothing_loss(logits, target, convention="fairseq", reduction="none")
    torch.testing.assert_close(value, expected)
