"""What a formula can break, over all losses at once: gradients, masks, labels, limits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labo import functional as F
from labo import smoothing
from loss_cases import (
    CASES,
    LOSS_CASES,
    REPRESENTATIVES,
    LossCase,
    batch,
    both,
    each_kind,
    each_loss,
    gradient,
    stored_teacher,
    teacher,
)
from worked import Y0, A, near


def each(cases: list[LossCase]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


shapes = st.tuples(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 9))
quick = settings(max_examples=10, deadline=None)


@each([case for case in LOSS_CASES if case.worked is not None])
def test_the_worked_number_of_a_case(case: LossCase):
    near(case(A, Y0), case.worked)


@pytest.mark.parametrize("weighted", [False, True])
def test_soft_label_losses_are_cross_entropy_with_their_label(weighted):
    """Value -sum w Q log p (plus w_y times the KL term), gradient (sum w Q) p - w Q."""
    logits, target = batch(3, 6, 5)
    weight = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0] if weighted else [1.0] * 5).double()
    uniform, p_star = torch.full_like(logits, 1 / 5), smoothing.tempered(logits, 1.25)
    alpha = smoothing.adaptive_alpha(logits)
    kl = 1.25 * (p_star * (5 * p_star).log()).sum(-1)
    for name, p, strength, penalty in (
        ("ls", uniform, 0.1, 0.0),
        ("labo", p_star, alpha, alpha * kl),
        ("labo-fixed", p_star, 0.3, 0.3 * kl),
        ("ps-kd", (logits * 0.5).sin().softmax(-1), 0.8, 0.0),
    ):
        case = CASES[name]
        q = smoothing.smoothed_target(target, p, strength)
        fixed = {"extra": case.extra(logits), "weight": weight if weighted else None}
        value = case(logits, target, reduction="none", **fixed)
        expected = -(weight * q * logits.log_softmax(-1)).sum(-1) + weight[target] * penalty
        torch.testing.assert_close(value, expected, msg=name)
        _, slope = both(case, logits, target, reduction="sum", **fixed)
        expected = (weight * q).sum(-1, keepdim=True) * logits.softmax(-1) - weight * q
        torch.testing.assert_close(slope, expected, msg=name)


# ------------------------------------------------------------------ gradients


# A detached part hides from finite differences: the next test compares those with their formula.
@each([case for case in LOSS_CASES if not case.detached])
def test_gradcheck(case):
    logits, target = batch(5, 4, 5, spread=1.5)
    target[2] = -100
    extra = case.extra(logits)
    leaf = logits.requires_grad_()
    for reduction in ("none", "mean"):
        assert torch.autograd.gradcheck(
            lambda z, r=reduction: case(z, target, reduction=r, extra=extra), (leaf,)
        )


def with_tail(logits, indices, log_probabilities):
    """The two stored probabilities, and LABO's distribution for the rest."""
    known = torch.zeros_like(logits).scatter(1, indices[:, :2], log_probabilities[:, :2].exp())
    tail = (logits / 1.25).masked_fill(known > 0, -math.inf).softmax(-1)
    return known + (1 - known.sum(-1, keepdim=True)) * tail


@each([case for case in LOSS_CASES if case.detached])
def test_gradient_of_losses_with_detached_parts(case):
    """The gradient is that of the loss with the detached part frozen at its present value."""
    logits, target = batch(5, 4, 5, spread=1.5)
    p = logits.softmax(-1)
    p_y = p.gather(1, target[:, None])
    onehot = torch.nn.functional.one_hot(target, 5)
    top = p.topk(2).values
    top = top / top.sum(-1, keepdim=True)
    labo_slope = p - smoothing.smoothed_target(
        target, smoothing.tempered(logits), smoothing.adaptive_alpha(logits)
    )
    other = teacher(logits)[0].softmax(-1)
    kl = (p * (p / other).log()).sum(-1, keepdim=True)
    sharp = (logits / 0.7).softmax(-1)
    gaps = logits - logits.gather(1, target[:, None])
    kept = sharp * torch.sigmoid(0.01 * gaps)
    largest = logits.amax(-1, keepdim=True)
    at_top = 2 * (logits - 1).clamp(min=0) * (logits == largest)
    below = -0.1 / 4 * 2 * (largest - logits - 1).clamp(min=0)
    alpha = smoothing.adaptive_alpha(logits)
    expected = {
        "gem": sharp - onehot,
        "gem-logsigmoid": kept - kept.sum(-1, keepdim=True) * onehot,
        "acls": p - onehot + 0.1 * (at_top + below),
        "als": p - smoothing.smoothed_target(target, smoothing.uniform(logits), alpha),
        "als-past": p - smoothing.smoothed_target(target, other, alpha),
        "labo": labo_slope,
        "labo-multiplied": 3.5 * labo_slope,
        "r-drop-labo": (labo_slope + p * ((p / other).log() - kl) + p - other) / 2,
        "fl-detached": (1 - p_y) * (p - onehot),
        "afl": (1 + 0.5 * p_y) * (p - onehot),
        "dft": p_y * (p - onehot),
        "topk-labo": p - 0.5 * onehot - 0.5 * with_tail(logits, *stored_teacher(logits)),
        "eaft": -torch.special.xlogy(p, p).sum(-1, keepdim=True) / math.log(5) * (p - onehot),
        "eaft-top": -torch.special.xlogy(top, top).sum(-1, keepdim=True) * (p - onehot),
    }[case.name]
    slope = gradient(lambda z: case(z, target, reduction="sum"), logits)
    torch.testing.assert_close(slope, expected)


@each_kind
def test_none_under_any_upstream_gradient(case):
    """reduction="none" is right for unequal upstream gradients, zeros (the first!) included."""
    logits, target = batch(7, 5, 6)
    target[3] = -100
    extra = case.extra(logits)
    upstream = torch.tensor([0.0, 2.0, -1.5, 3.0, 0.5], dtype=torch.float64)

    def values(z):
        return case(z, target, reduction="none", extra=extra)

    slope = gradient(lambda z: (values(z) * upstream).sum(), logits)
    each = torch.stack([gradient(lambda z, i=i: values(z)[i], logits) for i in range(5)])
    torch.testing.assert_close(slope, (each * upstream[:, None, None]).sum(0))
    assert slope[0].count_nonzero() == slope[3].count_nonzero() == 0


# ------------------------------------------------------------------ rows


@each(REPRESENTATIVES)
@quick
@given(shapes, st.data())
def test_ignoring_a_row_is_dropping_it(case, shape, data):
    """Whatever the ignored rows hold."""
    logits, target = batch(*shape)
    keep = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=len(target), max_size=len(target)))
    )
    ignored = target.masked_fill(~keep, -100)
    poisoned = logits.masked_fill(~keep[:, None], math.nan)
    extra = case.extra(logits)
    value, slope = both(case, poisoned, ignored, extra=extra)
    kept = case(logits[keep], target[keep], extra=case.take(extra, keep))
    torch.testing.assert_close(value, kept)
    assert slope[~keep].count_nonzero() == 0
    assert slope.isfinite().all()


@each([case for case in LOSS_CASES if case.rowwise])
def test_batch_is_the_sum_of_its_rows(case):
    logits, target = batch(8, 5, 6)
    value = case(logits, target, reduction="none")
    for i in range(5):
        alone = case(logits[i : i + 1], target[i : i + 1], reduction="none")
        assert torch.equal(alone, value[i : i + 1])
    torch.testing.assert_close(case(logits, target, reduction="sum"), value.sum())
    torch.testing.assert_close(case(logits, target), value.mean())


# ------------------------------------------------------------------ logits


@each([case for case in LOSS_CASES if case.shifts])
@quick
@given(shapes, st.floats(-50, 50))
def test_shift_invariance(case, shape, shift):
    logits, target = batch(*shape)
    extra = case.extra(logits)
    moved, value = (case(z, target, extra=extra) for z in (logits + shift, logits))
    torch.testing.assert_close(moved, value, atol=1e-9, rtol=1e-9)


@each([case for case in LOSS_CASES if case.off is not None])
@quick
@given(shapes)
def test_switched_off_it_is_cross_entropy(case, shape):
    logits, target = batch(*shape)
    expected = torch.nn.functional.cross_entropy(logits, target)
    torch.testing.assert_close(case(logits, target, **case.off), expected)


WITHOUT = [
    case
    for case in LOSS_CASES
    # K itself, or a table or mask over K classes, is part of these
    if not case.name.startswith(("labo", "held-", "tf-reg", "ols", "kr-ls", "mls", "wls", "topk"))
    and case.name not in ("ls-joeynmt", "kd-elementwise", "r-drop-labo")
]


@each(WITHOUT)
def test_masked_class_is_not_there(case):
    logits, target = batch(2, 6, 7)
    target = target.masked_fill(target == 3, 4)
    masked = logits.index_fill(-1, torch.tensor(3), -math.inf)
    without, fewer = logits[:, [0, 1, 2, 4, 5, 6]], target - (target > 3).long()
    torch.testing.assert_close(
        case(masked, target, extra=case.extra(logits)),
        case(without, fewer, extra=case.extra(without)),
    )


@each_loss
def test_masked_classes_are_finite_and_get_no_gradient(case):
    logits, target = batch(2, 6, 7)
    target = target.masked_fill((target == 3) | (target == 5), 4)
    logits[:, [3, 5]] = -math.inf
    extra = case.extra(torch.nan_to_num(logits, neginf=0.0))
    value, slope = both(case, logits, target, extra=extra, reduction="none")
    assert value.isfinite().all()
    assert slope.isfinite().all()
    assert slope[:, [3, 5]].count_nonzero() == 0
    assert slope.abs().sum() > 0


@each_loss
def test_one_and_two_classes(case):
    """With one class there is nothing to learn: no gradient, and no loss but that of penalties."""
    logits, target = batch(0, 4, 1)
    value, slope = both(case, logits, target, extra=case.extra(logits))
    torch.testing.assert_close(slope, torch.zeros_like(slope))
    if case.name not in ("cp-hinge", "connet"):
        assert value.item() == pytest.approx(0, abs=1e-12)
    logits, target = batch(0, 4, 2)
    value, slope = both(case, logits, target, extra=case.extra(logits))
    assert value.isfinite()
    assert slope.isfinite().all()


@each_loss
def test_nan_stays_nan(case):
    logits, target = batch(0, 3, 5)
    logits[1, 2] = math.nan
    extra = case.extra(torch.nan_to_num(logits))
    value = case(logits, target, reduction="none", extra=extra)
    if case.rowwise:
        assert value.isnan().tolist() == [False, True, False]
    assert case(logits, target, extra=extra).isnan()


# ------------------------------------------------------------------ labels


@each([case for case in LOSS_CASES if case.linear])
@quick
@given(shapes, st.floats(0, 1))
def test_linear_in_the_label(case, shape, mix):
    """A mixed label gives the mixed loss; a one-hot label gives that of the index."""
    logits, target = batch(*shape)
    other = target.roll(1)
    extra = case.extra(logits)
    one, two = (torch.nn.functional.one_hot(t, logits.shape[-1]).double() for t in (target, other))

    def value(t):
        return case(logits, t, reduction="none", extra=extra)

    torch.testing.assert_close(value(one), value(target))
    torch.testing.assert_close(
        value(mix * one + (1 - mix) * two), mix * value(target) + (1 - mix) * value(other)
    )


@each([case for case in LOSS_CASES if not case.linear])
def test_losses_not_linear_in_the_label_say_so(case):
    logits, _ = batch(0, 3, 4)
    with pytest.raises(ValueError, match="not linear in the label"):
        case(logits, logits.softmax(-1))


def test_masked_label_is_infinite():
    logits, target = torch.tensor([[-math.inf, 0.0, 1.0]]), torch.tensor([0])
    assert F.cross_entropy_loss(logits, target) == F.labo_loss(logits, target) == math.inf
