"""Devices without float64, such as MPS: sums in float32, with the same results."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labo import rows
from loss_cases import CASES, REPRESENTATIVES

# Of every way to make the sums; the fake device of test_gpu_costs.py knows every loss.
KINDS = [*REPRESENTATIVES, *(CASES[name] for name in ("dkd", "logitnorm", "ger", "topk-labo"))]


class NoFloat64(TorchDispatchMode):
    """Refuses every operation that gives float64."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.dtype == torch.float64:
                raise TypeError(f"{func} gives float64")
        return result


@pytest.fixture
def no_float64(monkeypatch):
    exact = rows.exact
    for name, module in list(sys.modules.items()):
        if name.startswith("labo.") and getattr(module, "exact", None) is exact:
            monkeypatch.setattr(module, "exact", lambda device, dtype=torch.float32: torch.float32)


def both(case, logits, target, extra, impl):
    leaf = logits.clone().requires_grad_()
    value = case(leaf, target, extra=extra, impl=impl)
    (slope,) = torch.autograd.grad(value, leaf)
    return value.detach(), slope


def extra_of(case, logits):
    given = case.extra(logits)
    return tuple(x.float() if x.is_floating_point() else x for x in given)


@pytest.mark.parametrize("impl", ["reference", "auto"])
@pytest.mark.parametrize("case", KINDS, ids=lambda case: case.name)
def test_a_loss_without_float64(case, impl, no_float64, monkeypatch):
    logits, target = 3 * torch.randn(6, 40), torch.randint(40, (6,))
    target[2] = -100
    extra = extra_of(case, logits)
    logits[1, 3:9] = -torch.inf
    target[1] = 20
    # As on another device: neither C kernel nor reading of values.
    monkeypatch.setattr("labo.fast.native.refuses", lambda logits: "no kernel for this device")
    monkeypatch.setattr("labo._checks.can_read", lambda tensor: False)
    with NoFloat64():
        value, slope = both(case, logits, target, extra, impl)
    monkeypatch.undo()
    exact = both(case, logits.double(), target, extra, "reference")
    torch.testing.assert_close(value.double(), exact[0], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(slope.double(), exact[1], rtol=2e-4, atol=2e-5)
