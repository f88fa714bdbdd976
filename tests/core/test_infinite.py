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
from conftest import LOSS_CASES, each_loss, triton_for_native
from labo import functional as F

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the Triton interpreter

INF = math.inf
BACKENDS = ["reference", "blocked", "native", "triton"]
LOSSES = {
    "ce": (F.cross_entropy_loss, {}),
    "ls": (F.label_smoothing_loss, {"alpha": 0.2}),
    "ls-1": (F.label_smoothing_loss, {"alpha": 1.0}),
    "labo": (F.labo_loss, {"tau": 1.3}),
    "labo-fixed": (F.labo_loss, {"alpha": 0.4, "tau": 0.8}),
    "labo-1": (F.labo_loss, {"alpha": 1.0}),
}
WITHOUT_SHARE = ["ls-1", "labo-1"]  # 1 - alpha is 0

each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_name = pytest.mark.parametrize("name", LOSSES)


def both(name, backend, logits, target, **arguments):
    """Value of each row, or reduced, and the gradient of their sum."""
    function, hyper = LOSSES[name]
    leaf = logits.clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        if backend == "triton":
            triton_for_native(patch)
        impl = "native" if backend == "triton" else backend
        value = function(leaf, target, impl=impl, **hyper, **arguments)
        (slope,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), slope


# ------------------------------------------------------------------ 0 * inf


@each_backend
@pytest.mark.parametrize("name", WITHOUT_SHARE)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_masked_target_without_a_share_costs_nothing(name, backend, weighted):
    logits = torch.tensor([[0.5, -INF, 1.0, -0.5], [0.5, 2.0, 1.0, -0.5]])
    target = torch.tensor([1, 1])
    weight = torch.tensor([0.5, 2.0, 1.5, 1.0]) if weighted else None
    value, slope = both(name, backend, logits, target, weight=weight, reduction="none")
    # the same row with another target differs by what has the weight of the label
    expected, expected_slope = both(
        name, "reference", logits.double(), target, weight=weight, reduction="none"
    )
    assert value.isfinite().all()
    assert slope.isfinite().all()
    assert slope[0, 1] == 0
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(slope.double(), expected_slope, rtol=1e-5, atol=1e-6)


@each_backend
def test_adaptive_alpha_without_entropy_leaves_no_share(backend):
    """One class is left: H = 0, alpha = 1, and KL(P || U) = 0 over that class."""
    logits, target = torch.tensor([[0.3, -INF, -INF]]), torch.tensor([1])
    value, slope = both("labo", backend, logits, target)
    assert value.item() == 0
    assert slope.abs().max() < 1e-6


@each_backend
@each_name
def test_masked_target_with_weight_0_costs_nothing(name, backend):
    logits = torch.tensor([[0.5, -INF, 1.0, -0.5], [0.5, 0.1, 1.0, -0.5]])
    target, weight = torch.tensor([1, 2]), torch.tensor([0.5, 0.0, 1.5, 1.0])
    value, slope = both(name, backend, logits, target, weight=weight, reduction="none")
    assert value.isfinite().all()
    assert slope.isfinite().all()
    # without the masked class, which has neither mass nor weight; the KL keeps its log K
    keep = [0, 2, 3]
    function, hyper = LOSSES[name]
    expected = function(
        logits[:1, keep].double(),
        torch.tensor([0]),
        weight=weight[keep].double(),
        impl="reference",
        reduction="none",
        **hyper,
    )
    if name == "ce":
        assert value[0] == 0
    elif name.startswith("ls"):
        # label 0 has weight 0.5 and a share; take it away
        p = logits[0, keep].double().log_softmax(-1)
        alpha = hyper["alpha"]
        assert value[0].item() == pytest.approx((expected + (1 - alpha) * 0.5 * p[0]).item(), 1e-5)
    mean, mean_slope = both(name, backend, logits, target, weight=weight)
    torch.testing.assert_close(mean, value.sum() / 1.5)
    torch.testing.assert_close(mean_slope, slope / 1.5)


@each_backend
@each_name
def test_masked_target_with_a_share_is_infinite(name, backend):
    logits, target = torch.tensor([[0.5, -INF, 1.0, -0.5]]), torch.tensor([1])
    value, _ = both(name, backend, logits, target)
    assert (value == INF) == (name not in WITHOUT_SHARE)


@each_backend
@each_name
def test_weights_that_are_all_0(name, backend):
    """Nothing counts: as if all rows were ignored."""
    logits = torch.tensor([[0.5, -INF, 1.0, -0.5], [0.5, 0.1, 1.0, -0.5]])
    value, slope = both(name, backend, logits, torch.tensor([1, 2]), weight=torch.zeros(4))
    assert value == 0
    assert slope.count_nonzero() == 0


@each_backend
@each_name
def test_mean_over_labels_of_weight_0(name, backend):
    """The weights of the labels add up to 0, although other classes have one."""
    logits, target = torch.randn(2, 4), torch.tensor([1, 1])
    weight = torch.tensor([0.5, 0.0, 1.5, 1.0])
    value, slope = both(name, backend, logits, target, weight=weight)
    assert value == 0
    assert slope.count_nonzero() == 0


@each_backend
@each_name
def test_nan_is_not_hidden_by_a_0(name, backend):
    logits = torch.tensor([[math.nan, -INF, 1.0, -0.5]])
    weight = torch.tensor([1.0, 0.0, 1.0, 1.0])
    value, _ = both(name, backend, logits, torch.tensor([1]), weight=weight, reduction="sum")
    assert value.isnan()


@each_loss
def test_every_loss_with_a_masked_target_of_weight_0(case):
    """Value and gradient are finite, and the row counts nothing in the mean."""
    logits = torch.randn(3, 5, dtype=torch.float64)
    extra = case.extra(logits)
    logits[0, 2] = -INF
    target = torch.tensor([2, 1, 4])
    weight = torch.tensor([0.5, 1.0, 0.0, 2.0, 1.5], dtype=torch.float64)
    leaf = logits.requires_grad_()
    value = case(leaf, target, weight=weight, extra=extra)
    assert value.isfinite()
    (slope,) = torch.autograd.grad(value, leaf)
    assert slope.isfinite().all()


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
        (
            lambda z, t, **h: F.smoothed_cross_entropy(
                z, t, torch.tensor([[0.5, 0.0, 0.25, 0.25]]), **h
            ),
            {"alpha": 1.0},
        ),
        (
            lambda z, t, **h: F.smoothed_cross_entropy(
                z, t, torch.tensor([[0.5, 0.0, 0.25, 0.25]]), **h
            ),
            {"alpha": torch.tensor([1.0])},
        ),
    ],
)
def test_other_losses_without_a_share_of_the_label(function, hyper):
    leaf = torch.tensor([[0.5, -INF, 1.0, -0.5]], requires_grad=True)
    value = function(leaf, torch.tensor([1]), **hyper)
    assert value.isfinite()
    (slope,) = torch.autograd.grad(value, leaf)
    assert slope.isfinite().all()


def test_smoothing_without_a_share_on_a_masked_class():
    """alpha = 0: mass on a masked class does not matter."""
    logits = torch.tensor([[0.5, -INF, 1.0, -0.5]])
    value = F.smoothed_cross_entropy(logits, torch.tensor([0]), torch.full((1, 4), 0.25), alpha=0.0)
    torch.testing.assert_close(value, F.cross_entropy_loss(logits, torch.tensor([0])))


# ------------------------------------------------------------------ near the limits of float32


LARGE = torch.finfo(torch.float32).max
magnitudes = st.sampled_from([0.0, 1.0, 1e20, 1e31, 1e38, 3e38, LARGE])


@each_backend
@each_name
@settings(max_examples=10, deadline=None)
@given(st.data())
def test_logits_near_the_limit_are_alike(name, backend, data):
    """No NaN, no infinity, and the value and gradient of the reference."""
    logits = torch.tensor(
        data.draw(
            st.lists(
                st.tuples(magnitudes, st.sampled_from([-1.0, 1.0])), min_size=12, max_size=12
            ).map(lambda pairs: [a * b for a, b in pairs])
        )
    ).reshape(2, 6)
    target = torch.tensor(data.draw(st.lists(st.integers(0, 5), min_size=2, max_size=2)))
    weighted = data.draw(st.booleans())
    weight = torch.tensor([0.25, 0.5, 0.125, 1.0, 0.75, 0.5]) if weighted else None
    value, slope = both(name, backend, logits, target, weight=weight, reduction="none")
    expected, expected_slope = both(
        name, "reference", logits, target, weight=weight, reduction="none"
    )
    assert expected.isfinite().all()
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(slope, expected_slope, rtol=1e-5, atol=1e-6)
    # the gradient is that of float64, where nothing overflows
    exact = both(name, "reference", logits.double(), target, weight=weight, reduction="none")
    torch.testing.assert_close(slope.double(), exact[1], rtol=1e-4, atol=1e-6)


@each_backend
@each_name
def test_value_near_the_limit_is_exact_where_float32_can_hold_it(name, backend):
    logits = torch.tensor([[1e38, -1e38, 0.0, 5e37], [2e30, 1e30, -1e30, 0.0]])
    target = torch.tensor([0, 1])
    value, _ = both(name, backend, logits, target, reduction="none")
    exact, _ = both(name, "reference", logits.double(), target, reduction="none")
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [c for c in LOSS_CASES if c.rowwise], ids=lambda c: c.name)
@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_every_loss_near_the_limit(case, scale):
    """Where the exact value is small, float32 has it, although differences of logits overflow."""
    logits = torch.tensor([[3e38, -3e38, 1.0, 2.0, -1e38], [2.0, 3e38, 3e38, -LARGE, LARGE]])
    logits, target = logits * scale, torch.tensor([0, 4])
    extra = case.extra(torch.randn(2, 5, dtype=torch.float64))
    leaf = logits.clone().requires_grad_()
    value = case(leaf, target, extra=extra, reduction="none")
    exact = case(logits.double(), target, extra=extra, reduction="none")
    assert not value.isnan().any()
    small = exact.abs() < 1e30
    torch.testing.assert_close(value[small].double(), exact[small], rtol=1e-5, atol=1e-5)
    if scale < 1:
        (slope,) = torch.autograd.grad(value.sum(), leaf)
        assert slope.isfinite().all()


def test_linear_loss_near_the_limit():
    hidden, matrix = torch.tensor([[1e19, 1.0]]), torch.tensor([[3e19, 0.0], [-3e19, 0.0], [0, 1]])
    for impl in ("native", "blocked", "reference"):
        value = labo.linear_loss(
            hidden, matrix, torch.tensor([0]), labo.LABOLoss(impl=impl), impl=impl
        )
        assert value.isfinite()
