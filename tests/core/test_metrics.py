"""linear_loss: metrics, token weights and z-loss, against the dense computation in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import labo
from labo import functional as F
from labo import metrics
from labo.fast import native
from labo.fast.dispatch import FastRows
from labo.heads.quantized import product_dtype
from layers import SMALL, D, N, V, measured, problem
from probes import LargestTensor

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}


def check(found: labo.LossMetrics, wanted: dict[str, Tensor], tolerance: float) -> None:
    for name, value in found._asdict().items():
        torch.testing.assert_close(
            value, wanted[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert not value.requires_grad


LOSSES = {
    "labo": labo.LABOLoss(),
    "ls": labo.LabelSmoothingLoss(alpha=0.2),
    "base": labo.CrossEntropyLoss(),
    "focal": labo.FocalLoss(gamma=2.0),  # a formula
    "eaft": labo.EAFTLoss(top_k=2),
    "labo-grad": labo.LABOLoss(alpha_grad=True),  # differentiated by autograd
}


@settings(max_examples=25, deadline=None)
@given(
    dtype=st.sampled_from(list(TOLERANCE)),
    rows=st.integers(2, 20),
    classes=st.integers(2, 40),
    name=st.sampled_from(list(LOSSES)),
    grad=st.booleans(),
    softcap=st.sampled_from([None, 2.0]),
    seed=st.integers(0, 100),
)
def test_metrics_are_those_of_the_logits(dtype, rows, classes, name, grad, softcap, seed):
    x, weight, bias, target = problem(dtype, rows, classes, seed)
    loss = LOSSES[name]
    # The logits as the head has them: rounded to the dtype of its products.
    logits = nn.functional.linear(*(t.to(product_dtype(x)) for t in (x, weight, bias)))
    if softcap:
        logits = softcap * (logits / softcap).tanh()
    wanted = measured(logits, target, loss)
    x.requires_grad_(grad)
    shared = {"linear_bias": bias, "softcap": softcap, "options": SMALL}
    value, found = labo.linear_loss(x, weight, target, loss, return_metrics="rows", **shared)
    check(found, wanted, TOLERANCE[dtype])
    value, found = labo.linear_loss(x, weight, target, loss, return_metrics=True, **shared)
    check(found, {k: v.sum() for k, v in wanted.items()}, TOLERANCE[dtype] * rows)
    assert torch.equal(value, labo.linear_loss(x, weight, target, loss, **shared))
    assert value.requires_grad == grad
    assert found.means()["accuracy"] == pytest.approx(float(found.correct / found.targets))


def test_ties_infinities_and_ignored_rows():
    logits = torch.tensor(
        [[2.0, 2.0, 0.0], [1.0, -math.inf, 0.0], [math.nan] * 3, [0.0, 5.0, 0.0]],
        dtype=torch.float64,
    )
    target = torch.tensor([1, 1, -100, 0])
    _, found = labo.linear_loss(
        torch.eye(4, dtype=torch.float64)[:, :2],
        torch.zeros(3, 2, dtype=torch.float64),
        target,
        labo.CrossEntropyLoss(),
        return_metrics="rows",
    )
    assert found.correct.tolist() == [1, 1, 0, 1]  # all logits are 0: ties are right
    statistics = metrics.row_statistics(logits, target, -100)
    assert statistics[:, metrics.CORRECT].tolist() == [1, 0, 0, 0]
    assert statistics[1, metrics.NLL] == math.inf
    assert statistics[2].tolist() == [0.0] * metrics.COLUMNS
    assert statistics[1, metrics.ENTROPY] == pytest.approx(
        float(torch.special.entr(torch.tensor([1.0, 0.0]).double().softmax(0)).sum())
    )


@pytest.mark.parametrize(
    ("loss", "wanted"),
    [
        (labo.CrossEntropyLoss(), 0.0),
        (labo.LabelSmoothingLoss(alpha=0.3), 0.3),
        (labo.LABOLoss(alpha=0.2), 0.2),
        (labo.MaskedLabelSmoothingLoss(torch.arange(V) > 2, alpha=0.3), 0.3),
        (labo.WeightedLabelSmoothingLoss(torch.arange(V) % 3, alpha=0.3), 0.3),
        (labo.GeneralizedEntropyLoss(alpha=0.5), 0.0),  # its order
        (labo.TFRegLoss(alpha=0.1), 0.0),  # of distillation, as the next ones
        (labo.DistillationLoss(alpha=0.9), 0.0),
        (labo.DecoupledDistillationLoss(alpha=1.0), 0.0),
        (labo.PSKDLoss(alpha=0.8, epochs=2), 0.0),
    ],
    ids=lambda x: type(x).__name__,
)
def test_alpha_is_the_weight_of_the_smoothing_distribution_or_0(loss, wanted):
    x, weight, _, target = problem()
    teacher = torch.randn(N, V).double() if loss.teacher_argument else None
    _, found = labo.linear_loss(
        x, weight, target, loss, teacher_logits=teacher, return_metrics=True
    )
    assert found.means()["alpha"] == pytest.approx(wanted)


def test_alpha_of_losses_that_linear_loss_does_not_take():
    logits, target = torch.randn(5, V).double(), torch.arange(5)
    for loss, wanted in (
        (labo.RDropLoss(), 0.0),
        (labo.RDropLoss(label="smoothed"), 0.1),
        (labo.KRLSLoss(V, alpha=0.5), 0.0),
        (nn.CrossEntropyLoss(label_smoothing=0.1), 0.0),
    ):
        assert metrics.loss_metrics(logits, target, loss).means()["alpha"] == pytest.approx(wanted)
    adaptive = metrics.loss_metrics(logits, target, labo.LABOLoss())
    found = metrics.loss_metrics(logits, target, labo.RDropLoss(label="labo"))
    assert found.alpha == adaptive.alpha > 0


def test_class_probabilities():
    x, weight, _, _ = problem()
    target = torch.rand(N, V, dtype=torch.float64).softmax(-1)
    _, found = labo.linear_loss(x, weight, target, labo.CrossEntropyLoss(), return_metrics=True)
    logits = x @ weight.T
    torch.testing.assert_close(found.nll, -(target * logits.log_softmax(-1)).sum())
    assert found.correct == (logits.argmax(-1) == target.argmax(-1)).sum()
    assert found.targets == N


def test_micro_batches_add_up():
    x, _, _, target = problem()
    head = labo.LinearLoss(D, V, labo.LABOLoss()).double()
    parts = [head(x[p], target[p], return_metrics=True)[1] for p in (slice(5), slice(5, N))]
    whole = head(x, target, return_metrics=True)[1]
    check(parts[0].plus(parts[1]), whole._asdict(), 1e-12)


@pytest.mark.parametrize(
    ("head", "name", "reduction", "dtype"),
    [
        ("plain", "labo", "mean", torch.float64),
        ("plain", "labo", "sum", torch.float32),
        ("plain", "focal", "none", torch.float32),
        ("adapted", "labo", "sum", torch.float32),
        ("adapted", "focal", "mean", torch.float64),
        ("compiled", "labo", "none", torch.float64),
        ("compiled", "focal", "mean", torch.float32),
    ],
)
def test_token_weight_and_z_loss(head, name, reduction, dtype):
    """sum_i t_i (loss_i + c w_y Z_i^2) over sum_i t_i w_y, in value and gradient."""
    *tensors, target = problem()
    target[-1] = -100
    token_weight = torch.rand(N, dtype=torch.float64) * 3 - 0.5
    given = token_weight.clone()
    given[target == -100] = torch.tensor([math.nan, math.inf]).double()  # does not matter
    class_weight = torch.rand(V, dtype=torch.float64)
    kind = type(LOSSES[name])
    loss = kind(weight=class_weight.to(dtype), reduction=reduction)
    low = torch.randn(2, D, dtype=torch.float64), torch.randn(V, 2, dtype=torch.float64)
    narrow = [t.to(dtype) for t in low]

    def ours(x, w, b):
        layer = labo.LowRankWeight(w, *narrow, scale=0.5) if head == "adapted" else w
        value, found = labo.linear_loss(
            x,
            layer,
            target,
            loss,
            linear_bias=b,
            softcap=3.0,
            token_weight=given,
            z_loss=0.3,
            return_metrics=True,
            options=SMALL,
        )
        return value.sum(), found

    def theirs(x, w, b):
        w = w + 0.5 * low[1] @ low[0] if head == "adapted" else w
        logits = 3.0 * (nn.functional.linear(x, w, b) / 3.0).tanh()
        rows = kind(weight=class_weight, reduction="none")(logits, target)
        rows = rows + F.z_loss(logits, target, lam=0.3, weight=class_weight, reduction="none")
        total = (rows * token_weight).sum()
        if reduction == "mean":
            valid = target != -100
            total = total / (token_weight * class_weight[target.clamp(min=0)])[valid].sum()
        return total, labo.LossMetrics(
            *(v.sum() for v in measured(logits, target, kind()).values())
        )

    torch._dynamo.reset()
    if head == "compiled":
        ours = torch.compile(ours, fullgraph=True, backend="aot_eager")
    results = []
    for function, made in ((ours, dtype), (theirs, torch.float64)):
        leaves = [t.to(made, copy=True).requires_grad_() for t in tensors]
        value, found = function(*leaves)
        slopes = [slope.double() for slope in torch.autograd.grad(value, leaves)]
        results.append((value.detach().double(), slopes, found))
    tolerance = 1e-10 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(*(r[:2] for r in results), rtol=tolerance, atol=tolerance)
    check(results[0][2], {k: v.detach() for k, v in results[1][2]._asdict().items()}, tolerance)


def test_half_types_with_a_late_gradient():
    x, weight, _, target = problem(torch.float32)
    options = {"token_weight": torch.rand(N), "z_loss": 0.1, "return_metrics": True}
    results = []
    for dtype in (torch.float32, torch.float16):
        leaf = x.to(dtype).clone().requires_grad_()
        loss = labo.LABOLoss()
        value, found = labo.linear_loss(leaf, weight.to(dtype), target, loss, **options)
        value.backward()
        results.append((value.detach(), leaf.grad.float(), torch.stack(found).float()))
    torch.testing.assert_close(*results, rtol=1e-2, atol=3e-3)


def test_weights_that_cancel_give_zero():
    x, weight, _, target = problem()
    x.requires_grad_()
    value = labo.linear_loss(
        x, weight, target, labo.LABOLoss(), token_weight=torch.zeros(N, dtype=torch.float64)
    )
    value.backward()
    assert value == 0
    assert not x.grad.any()


def test_nothing_of_the_size_of_the_logits():
    x, weight, _, target = problem(torch.float32, rows=64, classes=50)
    x.requires_grad_()
    with LargestTensor() as largest:
        value, _ = labo.linear_loss(
            x, weight, target, labo.LABOLoss(), z_loss=0.1, return_metrics=True, options=SMALL
        )
        value.backward()
    assert largest.largest < 64 * 50 / 4


@pytest.mark.parametrize(
    "loss",
    [
        labo.CrossEntropyLoss(),
        labo.LabelSmoothingLoss(),
        labo.LABOLoss(alpha=0.3),
        labo.LABOLoss(tau=1.25),
        labo.FocalLoss(),
        labo.GeneralizedEntropyLoss(),
        labo.LABOLoss(z_loss=0.1),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["native", "blocked"])
def test_a_loss_measures_as_the_separate_pass_does(loss, backend):
    """The statistics come from the sums of the loss itself, and change nothing else."""
    torch.manual_seed(0)
    logits = torch.randn(40, 301) * 8
    target = torch.randint(301, (40,))
    logits[3] = float("-inf")
    logits[3, 7] = 1.0
    target[3], target[4], target[5] = 7, -100, int(logits[5].argmax())
    logits[6, target[6]] = float("-inf")
    logits[7, 0] = float("nan")
    found = torch.full((40, metrics.COLUMNS), 9.0, dtype=torch.float64)
    rows = FastRows(loss, backend)
    if not rows.measures(logits):
        assert backend == "blocked"
        return
    values, grad = rows.rows(logits, target, 1.0, statistics=found)
    plain, plain_grad = rows.rows(logits, target, 1.0)
    torch.testing.assert_close(values, plain, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(grad, plain_grad, rtol=0, atol=0, equal_nan=True)
    expected = metrics.row_statistics(logits, target, -100)
    found[7, metrics.MAXIMUM] = expected[7, metrics.MAXIMUM]  # beside a NaN it may be anything
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert native.STATISTICS == metrics.COLUMNS


def test_which_losses_measure_in_the_same_pass():
    """A loss that leaves classes out of its sums takes a pass of its own."""
    logits = torch.randn(4, 9)
    for loss, wanted in (
        (labo.DistillationLoss(), True),
        (labo.DecoupledDistillationLoss(), False),
        (labo.TopKDistillationLoss(), False),
    ):
        assert FastRows(loss, "native", logits).measures(logits) is wanted
