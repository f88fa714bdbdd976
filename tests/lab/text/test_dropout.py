"""Fast dropout is dropout: right shares, right gradient, PyTorch's generator."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from labo.lab.text.model import FastDropout, fast_dropout


@pytest.mark.parametrize(("p", "dtype"), [(0.1, torch.float32), (0.9, torch.bfloat16)])
def test_the_share_that_is_dropped_and_the_scale(p, dtype):
    torch.manual_seed(1)
    n = 400_001  # no multiple of four
    kept = fast_dropout(torch.ones(n, dtype=dtype), p)
    assert kept.dtype == dtype
    five_deviations = 5 * (p * (1 - p) / n) ** 0.5
    assert abs((kept == 0).double().mean() - p) < five_deviations
    torch.testing.assert_close(
        kept.max().double(), torch.tensor(1 / (1 - p)).double(), rtol=4e-3, atol=0
    )


def test_places_are_independent():
    torch.manual_seed(2)
    dropped = (fast_dropout(torch.ones(4, 250_000), 0.5) == 0).double() - 0.5
    for step in range(1, 9):  # neighbours may come from one draw
        flat = dropped.flatten()
        assert abs((flat[step:] * flat[:-step]).mean()) < 5 * 0.25 / 1000


def test_the_gradient_goes_where_the_value_went():
    x = torch.randn(7, 5, requires_grad=True)
    y = fast_dropout(x, 0.4)
    y.sum().backward()
    torch.testing.assert_close(x.grad * x.detach(), y.detach())


def test_it_follows_the_generator():
    with FastDropout():
        draws = []
        for seed in (3, 3, 4):
            torch.manual_seed(seed)
            draws.append(F.dropout(torch.ones(1000), 0.5))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_only_what_drops_is_replaced(monkeypatch):
    def refuse(*_):
        raise AssertionError("called")

    x = torch.ones(3, 4)
    monkeypatch.setattr("labo.lab.text.model.fast_dropout", refuse)
    with FastDropout():
        assert torch.equal(F.dropout(x, 0.5, training=False), x)
        assert torch.equal(F.dropout(x, 0.0), x)
        assert torch.equal(F.dropout(x, 1.0), torch.zeros(3, 4))
        assert torch.equal(torch.relu(-x), torch.zeros(3, 4))
        with pytest.raises(AssertionError, match="called"):
            F.dropout(x, 0.5)
