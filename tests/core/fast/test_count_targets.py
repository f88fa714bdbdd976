"""One launch counts the targets, adds up their weights and finds those that are no class."""

from __future__ import annotations

import math

import pytest
import torch

from labo.fast import dispatch, kernels
from loss_cases import DEVICE


def count(target, classes, weight=None):
    target = torch.tensor(target, device=DEVICE)
    total, good = kernels.count_targets(target, classes, -100, weight)
    return total.item(), good.item()


def test_targets_that_count():
    assert count([0, 3, -100, 1], 4) == (3.0, True)
    assert count([-100, -100], 4) == (math.inf, True)  # a mean of nothing is 0
    assert count([2] * 9000 + [-100] * 5, 4) == (9000.0, True)  # several blocks


@pytest.mark.parametrize("bad", [4, -1, 1 << 40, -(1 << 62)])
@pytest.mark.parametrize("at", [0, 5000])
def test_a_target_that_is_no_class(bad, at):
    target = [1] * 5001
    target[at] = bad
    total, good = count(target, 4, torch.ones(4, device=DEVICE))
    assert not good
    assert total == 5000.0  # its weight is not read


def test_weights_of_the_targets():
    weight = torch.tensor([0.5, 2.0, 0.0, 1.0], device=DEVICE)
    assert count([0, 1, 1, -100], 4, weight) == (4.5, True)
    assert count([2, 2], 4, weight) == (math.inf, True)


@pytest.mark.parametrize("weighted", [False, True])
def test_it_is_the_denominator(weighted):
    weight = torch.rand(7) if weighted else None
    target = torch.randint(7, (50,)).masked_fill(torch.rand(50) < 0.3, -100)
    wanted = dispatch.denominator(torch.float32, target, 7, -100, weight)
    given = None if weight is None else weight.to(DEVICE)
    total, _ = kernels.count_targets(target.to(DEVICE), 7, -100, given)
    assert total.item() == pytest.approx(wanted, rel=1e-6)
