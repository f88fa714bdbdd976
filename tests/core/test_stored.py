"""Classes that are stored of a teacher: padding, masks, tails, and the digits of small masses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import BACKENDS, assert_no_worse_than_naive
from labo import functional as F
from loss_cases import LossCase, both

TAILS = ("bucket", "uniform", "labo", "drop", "renormalize")
DIVERGENCES = ("reverse", "jsd", "skew", "skew_reverse")
each_tail = pytest.mark.parametrize("tail", TAILS)


def stored(k):
    generator = torch.Generator().manual_seed(5)
    logits, teacher = 3 * torch.randn(2, 6, 5, generator=generator, dtype=torch.float64)
    top = teacher.log_softmax(-1).topk(k)
    return logits, torch.randint(5, (6,), generator=generator), teacher, top.indices, top.values


@pytest.mark.parametrize(
    "hyper",
    [{"tail": tail} for tail in TAILS] + [{"divergence": name} for name in DIVERGENCES],
    ids=str,
)
def test_all_classes_stored_is_distillation(hyper):
    """With masked classes too: they are masked for the teacher, as in distillation_loss."""
    logits, target, teacher, indices, log_t = stored(5)
    logits[:, 3] = -math.inf
    target = target.masked_fill(target == 3, 4)
    kd = {"alpha": 0.7, "reduction": "none"}
    divergence = {"divergence": hyper.get("divergence", "forward")}
    whole = LossCase("kd", F.distillation_loss, kd | divergence | {"tau": 1.0})
    kept = LossCase("topk", F.topk_distillation_loss, kd | hyper)
    torch.testing.assert_close(
        both(kept, logits, target, extra=(indices, log_t)),
        both(whole, logits, target, extra=(teacher,)),
    )


@each_tail
def test_padding_is_not_there(tail):
    logits, target, _, indices, log_t = stored(2)
    more = torch.cat([torch.full_like(indices, -1), indices], 1)
    values = torch.cat([torch.full_like(log_t, math.nan), log_t], 1)
    torch.testing.assert_close(
        F.topk_distillation_loss(logits, target, more, values, tail=tail),
        F.topk_distillation_loss(logits, target, indices, log_t, tail=tail),
    )


@each_tail
def test_nothing_stored(tail):
    logits, target, _, indices, log_t = stored(2)
    value = F.topk_distillation_loss(logits, target, indices.fill_(-1), log_t, alpha=1.0, tail=tail)
    assert value.isfinite()
    if tail not in ("uniform", "labo"):
        assert value.item() == pytest.approx(0, abs=1e-12)


@each_tail
def test_ignored_rows_may_hold_anything(tail):
    logits, target, _, indices, log_t = stored(2)
    expected = F.topk_distillation_loss(logits[1:], target[1:], indices[1:], log_t[1:], tail=tail)
    target[0], indices[0], log_t[0] = -100, 99, math.nan
    value = F.topk_distillation_loss(logits, target, indices, log_t, tail=tail)
    torch.testing.assert_close(value, expected)


def test_rounded_probabilities_are_accepted():
    """bfloat16 log-probabilities of all classes sum to more than 1 at times."""
    logits, target, teacher, indices, log_t = stored(5)
    half = log_t.bfloat16()
    value = F.topk_distillation_loss(logits, target, indices, half, alpha=1.0)
    whole = F.distillation_loss(logits, target, teacher, tau=1.0, alpha=1.0)
    torch.testing.assert_close(value, whole, atol=2e-2, rtol=0)
    assert value.dtype == torch.float64


def test_refuses():
    logits, target, _, indices, log_t = stored(2)

    def refused(message, indices=indices, log_t=log_t):
        with pytest.raises(ValueError, match=message):
            F.topk_distillation_loss(logits, target, indices, log_t)

    refused("has a class twice", indices=indices * 0)
    refused("not below the 5 classes", indices=indices + 4)
    refused("sum of probabilities above 1", log_t=log_t * 0)
    refused("must be integers", indices=indices.double())
    refused(r"must have shape \(6, 'k'\)", indices=indices[:5])
    refused(r"must have shape \(6, 'k'\)", indices=indices[:, :0], log_t=log_t[:, :0])
    refused("needs indices", log_t=None)
    with pytest.raises(ValueError, match="unknown tail 'buckets'; did you mean 'bucket'"):
        F.topk_distillation_loss(logits, target, indices, log_t, tail="buckets")


@each_tail
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    classes=st.integers(1, 40),
    share=st.floats(0, 1),
    scale=st.sampled_from([1.0, 30.0, 1000.0]),
    sure=st.booleans(),
    z_loss=st.sampled_from([0.0, 1e-3]),
)
def test_stored_classes(tail, seed, classes, share, scale, sure, z_loss):
    """Any number of stored classes, up to all; targets, masks and padding anywhere."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator)

    rows, k = 6, max(1, round(share * classes))
    logits = scale * (uniform(rows, classes) - 0.5)
    order = uniform(rows, classes).argsort(1)
    indices, log_t = order[:, :k], uniform(rows, classes).log_softmax(1)[:, :k]
    target = torch.randint(classes, (rows,), generator=generator)
    if sure:  # the stored classes have almost all of the mass
        log_t = log_t.log_softmax(1) - 1e-6
        logits.scatter_add_(1, indices, torch.full(indices.shape, 60.0))
    masked = uniform(rows, classes) < 0.2
    masked.scatter_(1, target.unsqueeze(1), False)
    logits.masked_fill_(masked, -math.inf)
    indices = indices.masked_fill(uniform(rows, k) < 0.2, -1)
    target[0], logits[0], indices[0] = -100, math.nan, classes + 5
    weight = torch.linspace(0.5, 2, classes) if seed % 2 else None
    case = LossCase("topk", F.topk_distillation_loss, {"tail": tail, "z_loss": z_loss})
    arguments = {"extra": (indices, log_t), "weight": weight, "reduction": "none"}
    before = logits.clone()
    for impl in BACKENDS:
        rounding = {"value_rounding": 1e-6, "rounding": 2e-6}
        assert_no_worse_than_naive(case, impl, logits, target, **rounding, **arguments)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())


def test_stored_classes_that_have_almost_all_of_the_mass():
    """The mass of the others, 2e-21, keeps its digits in the value and in the gradient."""
    logits, target = torch.zeros(1, 50), torch.tensor([0])
    logits[0, :4] = 50.0
    extra = torch.arange(4).unsqueeze(0), torch.full((1, 4), 0.2).log()
    case = LossCase("topk", F.topk_distillation_loss, {"alpha": 1.0, "tail": "bucket"})
    exact = both(case, logits.double(), target, extra=extra, impl="reference")
    for impl in BACKENDS:
        value, slope = both(case, logits, target, extra=extra, impl=impl)
        torch.testing.assert_close((value, slope), exact, rtol=1e-6, atol=0)
        assert slope[0, 4:].count_nonzero() == 46


def test_other_classes_far_below_the_stored_ones():
    """The lowest finite number as a mask: the stored classes keep their differences."""
    logits, target = torch.full((1, 50), torch.finfo(torch.float32).min), torch.tensor([1])
    logits[0, :4] = torch.tensor([1.0, 2.0, 0.5, 0.0])
    extra = torch.arange(4).unsqueeze(0), torch.full((1, 4), 0.25).log()
    case = LossCase("topk", F.topk_distillation_loss, {"tail": "renormalize"})
    exact = both(case, logits[:, :4].double(), target, extra=extra, impl="reference")
    for impl in BACKENDS:
        value, slope = both(case, logits, target, extra=extra, impl=impl)
        torch.testing.assert_close((value, slope[:, :4]), exact, rtol=1e-6, atol=1e-7)
