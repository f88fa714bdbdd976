"""The blocked backend: blocks of rows in plain PyTorch, for what the C kernel does not take."""

from __future__ import annotations

import pytest
import torch

from backends import each_one_call, sample
from labo.fast import blocked
from loss_cases import CASES, both


def test_moments():
    """Sums of squares; centred, also where the mean is far larger than the distances."""
    logits = torch.randn(5, 300) + 1000
    center, squares = blocked.moments(logits, True)
    torch.testing.assert_close(center, logits.double().mean(1), rtol=1e-6, atol=0)
    center, squares = blocked.moments(logits, False)
    assert not center.any()
    torch.testing.assert_close(squares, logits.double().square().sum(1), rtol=1e-6, atol=0)


@each_one_call
def test_float64_is_that_of_the_reference(case):
    logits, target = sample(40, 6, dtype=torch.float64)
    weight = torch.rand(6, dtype=torch.float64) + 0.1
    for arguments in ({}, {"weight": weight}):
        ours, truth = (
            both(case, logits, target, impl=impl, **arguments) for impl in ("blocked", "reference")
        )
        torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["labo", "fl", "kd", "topk-labo"])
def test_several_blocks_are_one(name, monkeypatch):
    case = CASES[name]
    logits, target = sample(9, 50)
    fixed = {"extra": case.extra(logits), "impl": "blocked", "reduction": "none"}
    whole = both(case, logits, target, **fixed)
    monkeypatch.setitem(blocked._BLOCK_BYTES, "cpu", 2 * 50 * 4)
    assert len(list(blocked.blocks(logits))) > 3
    torch.testing.assert_close(both(case, logits, target, **fixed), whole, rtol=0, atol=0)
