"""The losses that are formulas of sums: each backend against the reference in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from backends import (
    BACKENDS,
    assert_no_worse_than_naive,
    each_backend,
    each_formula,
    hard_rows,
)
from labo import functional as F
from labo.loss import Loss, hyper
from labo.sums import RowSums
from loss_cases import CASES, LossCase, both


@each_formula
@pytest.mark.parametrize(
    ("impl", "dtype"),
    [("blocked", torch.float32), ("native", torch.float32), ("native", torch.bfloat16)],
    ids=str,
)
def test_values_and_gradients(case, impl, dtype):
    logits, target = hard_rows(dtype=dtype)
    extra = case.extra(logits.nan_to_num().clamp(-50, 50))
    for weight in (None, torch.linspace(0, 2, logits.shape[1])):
        arguments = {"extra": extra, "weight": weight, "reduction": "none"}
        _, slope = assert_no_worse_than_naive(case, impl, logits, target, **arguments)
        assert slope[4].count_nonzero() == 0
        assert slope[1, : logits.shape[1] // 3].count_nonzero() == 0


@each_formula
@each_backend
def test_not_finite(case, impl):
    """Rows with a masked target, a NaN, a +inf and no class agree with the reference."""
    logits, target = torch.randn(4, 20), torch.arange(4)
    extra = case.extra(logits)
    logits[0, 0] = -math.inf
    logits[1, 7] = math.nan
    logits[2, 9] = math.inf
    logits[3] = -math.inf
    value = case(logits, target, extra=extra, impl=impl, reduction="none")
    expected = case(logits, target, extra=extra, impl="reference", reduction="none")
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=2e-6, equal_nan=True)
    assert value[1:3].isnan().all()


@each_formula
def test_layouts_in_place_and_half_types(case):
    logits, target = hard_rows()
    logits, target = logits[[0, 3, 5]], target[[0, 3, 5]]
    fixed = {"extra": case.extra(logits), "reduction": "none"}
    value, slope = both(case, logits, target, impl="native", **fixed)
    strided = torch.stack([logits, logits], 2)[:, :, 0]
    torch.testing.assert_close(both(case, strided, target, **fixed), (value, slope), rtol=0, atol=0)
    output = logits.clone().requires_grad_() * 1
    again = case(output, target, inplace=True, **fixed)
    (over,) = torch.autograd.grad(again, output, torch.linspace(-1, 2, 3))
    assert over.data_ptr() == output.data_ptr()
    assert torch.equal(over.double(), slope)
    half, half_slope = both(case, logits.half(), target, **fixed)
    exact, exact_slope = both(case, logits.half().double(), target, impl="reference", **fixed)
    torch.testing.assert_close(half, exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(half_slope, exact_slope, rtol=2e-3, atol=2e-3)


def test_a_teacher_in_another_dtype_and_masked_for_the_student():
    """A class that the student has masked does not count, however large its teacher's logit."""
    logits, target = torch.randn(3, 40), torch.tensor([1, 2, 3])
    logits[:, 30:] = -math.inf
    teacher = torch.randn(3, 40)
    teacher[:, 35] = 1e4
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        given = teacher.to(dtype)
        for impl in BACKENDS:
            value = F.distillation_loss(logits, target, given, impl=impl)
            expected = F.distillation_loss(logits.double(), target, given.double())
            torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)


def test_decoupled_distillation_of_sure_rows():
    """The target far above and far below the others, the only class, and a one-hot teacher."""
    logits, target = torch.randn(5, 40), torch.tensor([3, 37, 17, 5, 6])
    teacher = torch.randn(5, 40)
    logits[0, 3], teacher[1, 37] = 900.0, 500.0
    logits[2, 17] = teacher[2, 17] = -900.0
    logits[3], teacher[4] = -math.inf, -math.inf
    logits[3, 5], teacher[4, 6] = 2.0, 1.0
    for tau in (1.0, 4.0):
        fixed = {"tau": tau, "reduction": "none"}
        wide = {"extra": (teacher.double(),), "impl": "reference"}
        exact, exact_slope = both(CASES["dkd"], logits.double(), target, **wide, **fixed)
        assert exact.isfinite().all()
        for impl in BACKENDS:
            value, slope = both(CASES["dkd"], logits, target, extra=(teacher,), impl=impl, **fixed)
            torch.testing.assert_close(value, exact, rtol=2e-6, atol=1e-6)
            torch.testing.assert_close(slope, exact_slope, rtol=1e-5, atol=1e-5)


def test_ties_of_the_maximum():
    """The first of several largest logits gets the gradient of the maximum, as in the reference."""
    logits, target = torch.zeros(2, 2000), torch.tensor([3, 0])
    logits[:, 1500:1510] = 2.0
    for function in (F.max_suppression_loss, F.margin_smoothing_loss):
        case = LossCase("tie", function, {"lam": 0.5, "reduction": "none"})
        _, expected = both(case, logits.double(), target, impl="reference")
        for impl in BACKENDS:
            _, slope = both(case, logits, target, impl=impl)
            torch.testing.assert_close(slope, expected, rtol=1e-5, atol=1e-7)


def test_a_new_formula_needs_no_kernel():
    """The example of docs/add_a_method.md."""

    class Generalized(Loss):
        gamma: float = hyper(default=0.7, doc="from cross entropy to the probability of an error")

        def value(self, row: RowSums) -> Tensor:
            return row.weigh(-torch.expm1(self.gamma * row.log_p_y()) / self.gamma)

    logits, target = torch.randn(4, 50, requires_grad=True), torch.arange(4)
    p = logits.softmax(-1)[torch.arange(4), target]
    expected = (1 - p**0.7) / 0.7
    (slope,) = torch.autograd.grad(expected.sum(), logits)
    for impl in ("reference", *BACKENDS):
        value = Generalized(impl=impl, reduction="sum")(logits, target)
        torch.testing.assert_close(value.detach(), expected.detach().sum())
        torch.testing.assert_close(torch.autograd.grad(value, logits)[0], slope)
