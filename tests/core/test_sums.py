"""Masked targets, weights of 0 and logits near the limits of float32, alike on all four backends.

The rules are those of labo.fast.dispatch: 0 * inf = 0; a mean over labels of weight 0 is 0; a logit
that is finite is not masked, however far below the maximum it is.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import labo
from backends import ONE_CALL, each_of_four, on_backend
from labo import functional as F
from labo.sums import Traced
from loss_cases import LOSS_CASES, LossCase, both, each_loss

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the Triton interpreter

INF = math.inf
WITHOUT_SHARE = {  # 1 - alpha is 0
    "ls-1": LossCase("ls-1", F.label_smoothing_loss, {"alpha": 1.0}),
    "labo-1": LossCase("labo-1", F.labo_loss, {"alpha": 1.0}),
}
LOSSES = ONE_CALL | WITHOUT_SHARE

each_name = pytest.mark.parametrize("name", LOSSES)


def computed(name, backend, logits, target, **arguments):
    """Value of each row, or reduced, and the gradient."""
    with on_backend(backend) as impl:
        return both(LOSSES[name], logits, target, impl=impl, **arguments)


# ------------------------------------------------------------------ 0 * inf


@each_of_four
@pytest.mark.parametrize("name", WITHOUT_SHARE)
def test_masked_target_without_a_share_costs_nothing(name, backend):
    logits = torch.tensor([[0.5, -INF, 1.0, -0.5], [0.5, 2.0, 1.0, -0.5]])
    target = torch.tensor([1, 1])
    for weight in (None, torch.tensor([0.5, 2.0, 1.5, 1.0])):
        fixed = {"weight": weight, "reduction": "none"}
        value, slope = computed(name, backend, logits, target, **fixed)
        assert value.isfinite().all()
        assert slope[0, 1] == 0
        expected = computed(name, "reference", logits.double(), target, **fixed)
        torch.testing.assert_close((value, slope), expected, rtol=1e-5, atol=1e-6)


@each_of_four
def test_adaptive_alpha_without_entropy_leaves_no_share(backend):
    """One class is left: H = 0, alpha = 1, and KL(P || U) = 0 over that class."""
    logits, target = torch.tensor([[0.3, -INF, -INF]]), torch.tensor([1])
    value, slope = computed("labo", backend, logits, target)
    assert value.item() == 0
    assert slope.abs().max() < 1e-6


@each_of_four
@each_name
def test_masked_target_with_weight_0_costs_nothing(name, backend):
    logits = torch.tensor([[0.5, -INF, 1.0, -0.5], [0.5, 0.1, 1.0, -0.5]])
    target, weight = torch.tensor([1, 2]), torch.tensor([0.5, 0.0, 1.5, 1.0])
    value, slope = computed(name, backend, logits, target, weight=weight, reduction="none")
    assert value.isfinite().all()
    assert slope.isfinite().all()
    p = logits[0, [0, 2, 3]].double().log_softmax(-1)
    if name == "base":
        assert value[0] == 0
    elif name.startswith("ls"):  # over the classes that are there
        alpha = LOSSES[name].hyper["alpha"]
        share = -(weight[[0, 2, 3]].double() * p).sum() * alpha / 3
        assert value[0].item() == pytest.approx(share.item(), 1e-5)
    mean, _ = computed(name, backend, logits, target, weight=weight)
    torch.testing.assert_close(mean, value.sum() / 1.5, rtol=1e-6, atol=1e-6)


@each_of_four
@each_name
def test_masked_targets_nan_and_means_over_nothing(name, backend):
    """A masked target with a share is infinite; weights of 0 are as if rows were ignored."""
    logits, target = torch.tensor([[0.5, -INF, 1.0, -0.5]]), torch.tensor([1])
    value, _ = computed(name, backend, logits, target)
    assert (value == INF) == (name not in WITHOUT_SHARE)
    weight = torch.tensor([1.0, 0.0, 1.0, 1.0])
    broken = torch.tensor([[math.nan, -INF, 1.0, -0.5]])
    value, _ = computed(name, backend, broken, target, weight=weight, reduction="sum")
    assert value.isnan()
    logits = torch.tensor([[0.5, -INF, 1.0, -0.5], [0.5, 0.1, 1.0, -0.5]])
    for weights, labels in ((torch.zeros(4), [1, 2]), (weight, [1, 1])):
        value, slope = computed(name, backend, logits, torch.tensor(labels), weight=weights)
        assert value == 0
        assert slope.count_nonzero() == 0


@each_loss
def test_every_loss_with_a_masked_target_of_weight_0(case):
    """Value and gradient are finite, and the row counts nothing in the mean."""
    logits = torch.randn(3, 5, dtype=torch.float64)
    extra = case.extra(logits)
    logits[0, 2] = -INF
    weight = torch.tensor([0.5, 1.0, 0.0, 2.0, 1.5], dtype=torch.float64)
    value, slope = both(case, logits, torch.tensor([2, 1, 4]), weight=weight, extra=extra)
    assert value.isfinite()
    assert slope.isfinite().all()


PRIOR = torch.tensor([[0.5, 0.0, 0.25, 0.25]])


@pytest.mark.parametrize(
    ("function", "hyper"),
    [
        (F.tf_reg_loss, {"alpha": 1.0}),
        (lambda z, t, **h: F.distillation_loss(z, t, z.detach().nan_to_num(), **h), {"alpha": 1.0}),
        (
            lambda z, t, **h: F.ps_kd_loss(z, t, z.detach().nan_to_num(neginf=-1e9), **h),
            {"alpha": 1.0},
        ),
        (
            lambda z, t, **h: F.online_label_smoothing_loss(z, t, torch.ones(4, 4) / 4, **h),
            {"hard_weight": 0.0},
        ),
        (lambda z, t, **h: F.smoothed_cross_entropy(z, t, PRIOR, **h), {"alpha": 1.0}),
        (
            lambda z, t, **h: F.smoothed_cross_entropy(z, t, PRIOR, **h),
            {"alpha": torch.tensor([1.0])},
        ),
    ],
)
def test_other_losses_without_a_share_of_the_label(function, hyper):
    case = LossCase("", function, hyper)
    value, slope = both(case, torch.tensor([[0.5, -INF, 1.0, -0.5]]), torch.tensor([1]))
    assert value.isfinite()
    assert slope.isfinite().all()


# ------------------------------------------------------------------ near the limits of float32


LARGE = torch.finfo(torch.float32).max
magnitudes = st.sampled_from([0.0, 1.0, 1e20, 1e31, 1e38, 3e38, LARGE])
numbers = st.tuples(magnitudes, st.sampled_from([-1.0, 1.0])).map(math.prod)


@each_of_four
@each_name
@settings(max_examples=8, deadline=None)
@given(st.lists(numbers, min_size=12, max_size=12), st.integers(0, 5), st.booleans())
def test_logits_near_the_limit_are_alike(name, backend, logits, label, weighted):
    """No NaN, no infinity, and the value and gradient of the reference."""
    logits, target = torch.tensor(logits).reshape(2, 6), torch.tensor([label, 5 - label])
    weight = torch.tensor([0.25, 0.5, 0.125, 1.0, 0.75, 0.5]) if weighted else None
    fixed = {"weight": weight, "reduction": "none"}
    value, slope = computed(name, backend, logits, target, **fixed)
    expected, expected_slope = computed(name, "reference", logits, target, **fixed)
    assert expected.isfinite().all()
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(slope, expected_slope, rtol=1e-5, atol=1e-6)
    # the gradient is that of float64, where nothing overflows
    _, exact = computed(name, "reference", logits.double(), target, **fixed)
    torch.testing.assert_close(slope, exact, rtol=1e-4, atol=1e-6)


@each_of_four
@each_name
def test_value_near_the_limit_is_exact_where_float32_can_hold_it(name, backend):
    logits = torch.tensor([[1e38, -1e38, 0.0, 5e37], [2e30, 1e30, -1e30, 0.0]])
    target = torch.tensor([0, 1])
    value, _ = computed(name, backend, logits, target, reduction="none")
    exact, _ = computed(name, "reference", logits.double(), target, reduction="none")
    torch.testing.assert_close(value, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [c for c in LOSS_CASES if c.rowwise], ids=lambda c: c.name)
@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_every_loss_near_the_limit(case, scale):
    """Where the exact value is small, float32 has it, although differences of logits overflow."""
    logits = torch.tensor([[3e38, -3e38, 1.0, 2.0, -1e38], [2.0, 3e38, 3e38, -LARGE, LARGE]])
    logits, target = logits * scale, torch.tensor([0, 4])
    extra = case.extra(torch.randn(2, 5, dtype=torch.float64))
    value, slope = both(case, logits, target, extra=extra, reduction="none")
    exact = case(logits.double(), target, extra=extra, reduction="none")
    assert not value.isnan().any()
    small = exact.abs() < 1e30
    torch.testing.assert_close(value[small], exact[small], rtol=1e-5, atol=1e-5)
    assert scale == 1 or slope.isfinite().all()


def test_linear_loss_near_the_limit():
    hidden, matrix = torch.tensor([[1e19, 1.0]]), torch.tensor([[3e19, 0.0], [-3e19, 0.0], [0, 1]])
    for impl in ("native", "blocked", "reference"):
        value = labo.linear_loss(
            hidden, matrix, torch.tensor([0]), labo.LABOLoss(impl=impl), impl=impl
        )
        assert value.isfinite()


def test_a_formula_with_an_unknown_sum_says_so():
    with pytest.raises(AttributeError, match="the sums of a row have no 'log_k'"):
        _ = Traced(labo.CrossEntropyLoss(), weighted=False, device=None).log_k
