"""The label of every row-wise loss, and the confidence in place of tau."""

from __future__ import annotations

import pytest
import torch

import labo
from labo import functional as F
from labo.smoothing import stationary_confidence
from loss_cases import LOSS_CASES, gradient
from worked import BATCH as Z
from worked import TARGETS as Y


@pytest.mark.parametrize(
    "case", [c for c in LOSS_CASES if c.name in labo.LOSSES], ids=lambda c: c.name
)
def test_the_label_of_every_loss_makes_its_gradient(case):
    cls = labo.LOSSES[case.name]
    if not cls.rowwise or (case.extra(Z) and not case.has_teacher):
        return
    positional = {"epochs": 1, "warmup_epochs": 0}
    known = {name: value for name, value in positional.items() if name in cls.fields}
    loss = cls(**known, **case.hyper)
    extra = case.extra(Z)
    label = labo.label_of(loss, Z, Y, *extra)
    expected = gradient(lambda z: loss.having(reduction="sum").compute(z, Y, *extra), Z)
    torch.testing.assert_close(Z.softmax(-1) - label, expected)
    if case.shifts:
        torch.testing.assert_close(label.sum(-1), torch.ones(2, dtype=torch.float64))


def test_a_label_in_another_layout_and_of_an_ignored_row():
    columns = labo.label_of(labo.LabelSmoothingLoss(dim=0), Z.T, Y)
    torch.testing.assert_close(columns, labo.label_of(labo.LabelSmoothingLoss(), Z, Y).T)
    ignored = labo.label_of(labo.FocalLoss(), Z, torch.tensor([0, -100]))
    torch.testing.assert_close(ignored[1], Z[1].softmax(-1))


def test_the_label_of_a_warm_up_is_that_of_the_active_loss():
    warming = labo.Warmup(labo.LabelSmoothingLoss(), labo.LABOLoss(), steps=2)
    before = labo.label_of(warming, Z, Y)
    torch.testing.assert_close(before, labo.label_of(labo.LabelSmoothingLoss(), Z, Y))
    warming.step()
    assert not torch.equal(before, labo.label_of(warming, Z, Y))


@pytest.mark.parametrize("loss", [torch.nn.CrossEntropyLoss(), labo.BetaSmoothingLoss()])
def test_a_label_of_what_is_no_row_wise_loss_is_refused(loss):
    with pytest.raises(ValueError, match=f"row-wise loss of labo, got {type(loss).__name__}"):
        labo.label_of(loss, Z, Y)


class TestConfidence:
    @pytest.mark.parametrize("alpha", ["adaptive", 0.4])
    def test_it_sets_tau(self, alpha):
        loss = labo.LABOLoss(confidence=0.8, num_classes=50, alpha=alpha)
        assert stationary_confidence(50, tau=loss.tau, alpha=alpha) == pytest.approx(0.8)
        same = labo.LABOLoss(tau=loss.tau, alpha=alpha)
        assert torch.equal(loss(Z, Y), same(Z, Y))
        given = F.labo_loss(Z, Y, confidence=0.8, num_classes=50, alpha=alpha)
        assert torch.equal(given, same(Z, Y))

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"tau": 1.25, "num_classes": 4}, "tau=1.25 and confidence=0.8 were given"),
            ({}, "confidence needs num_classes"),
            ({"num_classes": 4, "alpha": 0.1}, "no tau gives a confidence of 0.8"),
        ],
    )
    def test_what_does_not_go_together(self, given, message):
        with pytest.raises(ValueError, match=message):
            labo.LABOLoss(confidence=0.8, **given)
        with pytest.raises(ValueError, match=message):
            F.labo_loss(Z, Y, confidence=0.8, **given)
