"""Oracles, gradients and properties, over all losses at once."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import LOSS_CASES, each_loss, gradient, stored_teacher, teacher
from labo import functional as F
from labo import smoothing

CASES = {case.name: case for case in LOSS_CASES}
ROWWISE = [case for case in LOSS_CASES if case.rowwise]
LINEAR = [case for case in LOSS_CASES if case.linear]


def batch(seed: int, rows: int, classes: int, spread: float = 3.0):
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    return logits, torch.randint(classes, (rows,), generator=generator)


shapes = st.tuples(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 9))
quick = settings(max_examples=15, deadline=None)


# ------------------------------------------------------------------ independent oracles


WEIGHTS = [None, torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0], dtype=torch.float64)]


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weight", WEIGHTS, ids=["unweighted", "weighted"])
@pytest.mark.parametrize("ignore_index", [-100, 2])
@pytest.mark.parametrize("alpha", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("layout", ["rows", "channels"])
def test_label_smoothing_is_pytorchs(reduction, weight, ignore_index, alpha, layout):
    shape = (4, 5) if layout == "rows" else (4, 5, 3, 2)
    logits = torch.randn(shape, dtype=torch.float64)
    target = torch.randint(5, (shape[0], *shape[2:]))
    target[1] = ignore_index
    arguments = {"weight": weight, "ignore_index": ignore_index, "reduction": reduction}
    dim = -1 if layout == "rows" else 1

    def ours(z):
        return F.label_smoothing_loss(z, target, alpha=alpha, dim=dim, **arguments)

    def theirs(z):
        return torch.nn.functional.cross_entropy(z, target, label_smoothing=alpha, **arguments)

    torch.testing.assert_close(ours(logits), theirs(logits))
    upstream = torch.rand_like(ours(logits))
    torch.testing.assert_close(
        gradient(lambda z: (ours(z) * upstream).sum(), logits),
        gradient(lambda z: (theirs(z) * upstream).sum(), logits),
    )


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weight", WEIGHTS, ids=["unweighted", "weighted"])
def test_probability_targets_are_pytorchs(reduction, weight):
    logits = torch.randn(4, 5, dtype=torch.float64)
    target = torch.rand(4, 5, dtype=torch.float64).softmax(-1)
    for alpha in (0.0, 0.3):
        torch.testing.assert_close(
            F.label_smoothing_loss(logits, target, alpha=alpha, weight=weight, reduction=reduction),
            torch.nn.functional.cross_entropy(
                logits, target, weight=weight, reduction=reduction, label_smoothing=alpha
            ),
        )


def test_fairseq_convention():
    """Parity with fairseq's formula: (1 - eps - eps_i) nll + eps_i sum of -log p."""
    logits, target = batch(0, 7, 11)
    log_p = logits.log_softmax(-1)
    eps_i = 0.1 / 10
    nll = -log_p.gather(1, target[:, None]).squeeze(1)
    expected = (1 - 0.1 - eps_i) * nll + eps_i * -log_p.sum(-1)
    value = F.label_smoothing_loss(logits, target, convention="fairseq", reduction="none")
    torch.testing.assert_close(value, expected)


def test_joeynmt_convention():
    """Parity with JoeyNMT: KL to a label with eps/(V-2) off the target and 0 on padding."""
    pad = 1
    logits, target = batch(0, 7, 11)
    target = target.masked_fill(target == pad, 2)
    target[3] = pad
    smooth = torch.full_like(logits, 0.1 / 9).scatter(1, target[:, None], 0.9)
    smooth[:, pad] = 0
    smooth[3] = 0
    kl = torch.nn.functional.kl_div(logits.log_softmax(-1), smooth, reduction="sum")
    label_entropy = -torch.special.xlogy(smooth, smooth).sum()
    value = F.label_smoothing_loss(
        logits,
        target,
        convention="joeynmt",
        padding_idx=pad,
        ignore_index=pad,
        reduction="sum",
    )
    torch.testing.assert_close(value - label_entropy, kl)


def test_hinton_distillation_by_kl_div():
    logits, target = batch(0, 7, 11)
    teacher, _ = batch(1, 7, 11)
    kl = torch.nn.functional.kl_div(
        (logits / 4).log_softmax(-1), (teacher / 4).softmax(-1), reduction="batchmean"
    )
    ce = torch.nn.functional.cross_entropy(logits, target)
    value = F.distillation_loss(logits, target, teacher, alpha=0.9, tau=4)
    torch.testing.assert_close(value, 0.1 * ce + 0.9 * 16 * kl)
    mean = torch.nn.functional.kl_div(
        (logits / 4).log_softmax(-1), (teacher / 4).softmax(-1), reduction="none"
    ).mean()
    value = F.distillation_loss(logits, target, teacher, kl_reduction="elementwise")
    torch.testing.assert_close(value, 0.1 * ce + 0.9 * 16 * mean)


def weighted_label_cases(logits, target):
    """Losses that are a cross entropy with a constant label Q: that label."""
    uniform = torch.full_like(logits, 1 / logits.shape[-1])
    alpha = smoothing.adaptive_alpha(logits)
    yield "ls", smoothing.smoothed_target(target, uniform, 0.1), 0.0
    p_star = smoothing.tempered(logits, 1.25)
    kl = (p_star * (logits.shape[-1] * p_star).log()).sum(-1)
    yield "labo", smoothing.smoothed_target(target, p_star, alpha), 1.25 * alpha * kl
    yield "labo-fixed", smoothing.smoothed_target(target, p_star, 0.3), 1.25 * 0.3 * kl
    past = (logits * 0.5).sin().softmax(-1)
    yield "pskd", smoothing.smoothed_target(target, past, 0.8), 0.0


@pytest.mark.parametrize("weight", WEIGHTS, ids=["unweighted", "weighted"])
def test_soft_label_losses_are_cross_entropy_with_their_label(weight):
    """Value -sum w Q log p (plus w_y times the KL term), gradient (sum w Q) p - w Q."""
    logits, target = batch(3, 6, 5)
    w = torch.ones(5, dtype=torch.float64) if weight is None else weight
    for name, q, penalty in weighted_label_cases(logits, target):
        loss = CASES[name]
        value = loss(logits, target, weight=weight, reduction="none")
        expected = -(w * q * logits.log_softmax(-1)).sum(-1) + w[target] * penalty
        torch.testing.assert_close(value, expected, msg=name)
        extra = loss.extra(logits)
        slope = gradient(
            lambda z, c=loss, s=extra: c(z, target, weight=weight, reduction="sum", extra=s),
            logits,
        )
        expected = (w * q).sum(-1, keepdim=True) * logits.softmax(-1) - w * q
        torch.testing.assert_close(slope, expected, msg=name)


# ------------------------------------------------------------------ gradients


# A detached part hides from finite differences: the next test compares those with their formula.
@pytest.mark.parametrize("case", [c for c in LOSS_CASES if not c.detached], ids=lambda c: c.name)
def test_gradcheck(case):
    """Finite differences agree."""
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


@pytest.mark.parametrize("case", [c for c in LOSS_CASES if c.detached], ids=lambda c: c.name)
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
        "rdrop-labo": (labo_slope + p * ((p / other).log() - kl) + p - other) / 2,
        "fl-detached": (1 - p_y) * (p - onehot),
        "afl": (1 + 0.5 * p_y) * (p - onehot),
        "dft": p_y * (p - onehot),
        "topk-labo": p - 0.5 * onehot - 0.5 * with_tail(logits, *stored_teacher(logits)),
        "eaft": -torch.special.xlogy(p, p).sum(-1, keepdim=True) / math.log(5) * (p - onehot),
        "eaft-top": -torch.special.xlogy(top, top).sum(-1, keepdim=True) * (p - onehot),
    }[case.name]
    slope = gradient(lambda z: case(z, target, reduction="sum"), logits)
    torch.testing.assert_close(slope, expected)


@each_loss
def test_none_under_any_upstream_gradient(case):
    """reduction="none" is right for unequal upstream gradients, zeros (the first!) included."""
    logits, target = batch(7, 5, 6)
    target[3] = -100
    extra = case.extra(logits)
    upstream = torch.tensor([0.0, 2.0, -1.5, 3.0, 0.5], dtype=torch.float64)
    slope = gradient(
        lambda z: (case(z, target, reduction="none", extra=extra) * upstream).sum(), logits
    )
    each = torch.stack(
        [
            gradient(lambda z, i=i: case(z, target, reduction="none", extra=extra)[i], logits)
            for i in range(5)
        ]
    )
    torch.testing.assert_close(slope, (each * upstream[:, None, None]).sum(0))
    assert slope[0].count_nonzero() == 0
    assert slope[3].count_nonzero() == 0


@pytest.mark.parametrize("case", ROWWISE, ids=lambda c: c.name)
def test_micro_batches_add_up(case):
    """Sums over unequal micro-batches divided by the token count are the mean of the batch."""
    logits, target = batch(8, 9, 6)
    target[[1, 4, 5]] = -100
    extra = case.extra(logits)
    whole = gradient(lambda z: case(z, target, extra=extra), logits)

    def accumulated(z):
        total = 0.0
        for part in (slice(0, 2), slice(2, 3), slice(3, 9)):
            rows = case.take(extra, part)
            total = total + case(z[part], target[part], reduction="sum", extra=rows)
        return total / (target != -100).sum()

    torch.testing.assert_close(gradient(accumulated, logits), whole)


class TestStoredTeacher:
    """topk_distillation_loss on classes that are padding, masked, wrong, or all of them."""

    TAILS = ("bucket", "uniform", "labo", "drop", "renormalize")

    def stored(self, k):
        logits, target = batch(5, 6, 5)
        teacher = batch(6, 6, 5)[0]
        top = teacher.log_softmax(-1).topk(k)
        return logits, target, teacher, top.indices, top.values

    @pytest.mark.parametrize("tail", TAILS)
    def test_all_classes_stored_is_distillation(self, tail):
        """With masked classes too: they are masked for the teacher, as in distillation_loss."""
        logits, target, teacher, indices, log_t = self.stored(5)
        logits[:, 3] = -math.inf
        target = target.masked_fill(target == 3, 4)
        kd = {"alpha": 0.7, "reduction": "none"}
        torch.testing.assert_close(
            F.topk_distillation_loss(logits, target, indices, log_t, tail=tail, **kd),
            F.distillation_loss(logits, target, teacher, tau=1.0, **kd),
        )

    @pytest.mark.parametrize("tail", TAILS)
    def test_padding_is_not_there(self, tail):
        logits, target, _, indices, log_t = self.stored(2)
        more = torch.cat([torch.full_like(indices, -1), indices], 1)
        values = torch.cat([torch.full_like(log_t, math.nan), log_t], 1)
        torch.testing.assert_close(
            F.topk_distillation_loss(logits, target, more, values, tail=tail),
            F.topk_distillation_loss(logits, target, indices, log_t, tail=tail),
        )

    @pytest.mark.parametrize("tail", TAILS)
    def test_nothing_stored(self, tail):
        logits, target, _, indices, log_t = self.stored(2)
        value = F.topk_distillation_loss(
            logits, target, indices.fill_(-1), log_t, alpha=1.0, tail=tail
        )
        assert value.isfinite()
        if tail not in ("uniform", "labo"):
            assert value.item() == pytest.approx(0, abs=1e-12)

    @pytest.mark.parametrize("tail", TAILS)
    def test_ignored_rows_may_hold_anything(self, tail):
        logits, target, _, indices, log_t = self.stored(2)
        expected = F.topk_distillation_loss(
            logits[1:], target[1:], indices[1:], log_t[1:], tail=tail
        )
        target[0], indices[0], log_t[0] = -100, 99, math.nan
        value = F.topk_distillation_loss(logits, target, indices, log_t, tail=tail)
        torch.testing.assert_close(value, expected)

    def test_rounded_probabilities_are_accepted(self):
        """bfloat16 log-probabilities of all classes sum to more than 1 at times."""
        logits, target, teacher, indices, log_t = self.stored(5)
        half = log_t.bfloat16()
        value = F.topk_distillation_loss(logits, target, indices, half, alpha=1.0)
        whole = F.distillation_loss(logits, target, teacher, tau=1.0, alpha=1.0)
        torch.testing.assert_close(value, whole, atol=2e-2, rtol=0)
        assert value.dtype == torch.float64

    def test_refuses(self):
        logits, target, _, indices, log_t = self.stored(2)

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


class TestZLoss:
    def test_gradcheck(self):
        logits, target = batch(5, 4, 5)
        target[2] = -100
        leaf = logits.requires_grad_()
        for reduction in ("none", "mean"):
            assert torch.autograd.gradcheck(
                lambda z, r=reduction: F.z_loss(z, target, lam=0.3, reduction=r), (leaf,)
            )

    @pytest.mark.parametrize("weight", WEIGHTS, ids=["unweighted", "weighted"])
    def test_value_with_ignored_rows_masks_and_weights(self, weight):
        logits, target = batch(5, 6, 5)
        logits[:, 3] = -math.inf
        logits[2] = math.nan
        target[2] = -100
        rows = [0, 1, 3, 4, 5]
        w = torch.ones(5, dtype=torch.float64) if weight is None else weight
        z = logits[rows].logsumexp(-1)
        expected = (w[target[rows]] * 0.3 * z**2).sum() / w[target[rows]].sum()
        torch.testing.assert_close(F.z_loss(logits, target, lam=0.3, weight=weight), expected)
        slope = gradient(lambda z: F.z_loss(z, target, lam=0.3, weight=weight), logits)
        assert slope.isfinite().all()
        assert slope[:, 3].count_nonzero() == slope[2].count_nonzero() == 0

    def test_only_the_shift_matters(self):
        """At any probabilities the logits with log-sum-exp 0 cost nothing."""
        logits, target = batch(5, 4, 5)
        assert F.z_loss(logits.log_softmax(-1), target).item() == pytest.approx(0, abs=1e-30)
        assert F.z_loss(logits.half(), target).dtype == torch.float32
        torch.testing.assert_close(
            F.z_loss(logits[:, :1], target * 0), 1e-4 * logits[:, 0].square().mean()
        )


# ------------------------------------------------------------------ properties


@pytest.mark.parametrize("case", [c for c in LOSS_CASES if c.shifts], ids=lambda c: c.name)
@quick
@given(shapes, st.floats(-50, 50))
def test_shift_invariance(case, shape, shift):
    logits, target = batch(*shape)
    extra = case.extra(logits)
    torch.testing.assert_close(
        case(logits + shift, target, extra=extra),
        case(logits, target, extra=extra),
        atol=1e-9,
        rtol=1e-9,
    )


@pytest.mark.parametrize("case", ROWWISE, ids=lambda c: c.name)
@quick
@given(shapes, st.randoms())
def test_row_permutation(case, shape, random):
    logits, target = batch(*shape)
    order = list(range(len(target)))
    random.shuffle(order)
    value = case(logits, target, reduction="none")
    assert torch.equal(case(logits[order], target[order], reduction="none"), value[order])


@pytest.mark.parametrize("case", ROWWISE, ids=lambda c: c.name)
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
    kept = case.take(extra, keep)
    torch.testing.assert_close(
        case(poisoned, ignored, extra=extra), case(logits[keep], target[keep], extra=kept)
    )
    slope = gradient(lambda z: case(z, ignored, extra=extra), poisoned)
    assert slope[~keep].count_nonzero() == 0
    assert slope.isfinite().all()


@pytest.mark.parametrize("case", ROWWISE, ids=lambda c: c.name)
@quick
@given(shapes)
def test_batch_is_the_sum_of_its_rows(case, shape):
    logits, target = batch(*shape)
    value = case(logits, target, reduction="none")
    for i in range(len(target)):
        alone = case(logits[i : i + 1], target[i : i + 1], reduction="none")
        assert torch.equal(alone, value[i : i + 1])
    torch.testing.assert_close(case(logits, target, reduction="sum"), value.sum())
    torch.testing.assert_close(case(logits, target), value.mean())


@pytest.mark.parametrize("case", [c for c in LOSS_CASES if c.off is not None], ids=lambda c: c.name)
@quick
@given(shapes)
def test_switched_off_it_is_cross_entropy(case, shape):
    logits, target = batch(*shape)
    torch.testing.assert_close(
        case(logits, target, **case.off), torch.nn.functional.cross_entropy(logits, target)
    )


@quick
@given(shapes, st.floats(0.01, 1))
def test_labo_at_high_tau_is_label_smoothing(shape, alpha):
    logits, target = batch(*shape)
    torch.testing.assert_close(
        F.labo_loss(logits, target, alpha=alpha, tau=1e8),
        F.label_smoothing_loss(logits, target, alpha=alpha),
        atol=1e-5,
        rtol=1e-5,
    )


@quick
@given(shapes, st.floats(0.01, 1), st.floats(0.3, 5), st.integers(0, 1000))
def test_labo_is_below_any_other_smoothing(shape, alpha, tau, seed):
    logits, target = batch(*shape)
    other, _ = batch(seed, *shape[1:])
    best = F.labo_loss(logits, target, alpha=alpha, tau=tau, reduction="none")
    value = F.smoothed_cross_entropy(
        logits, target, other.softmax(-1), alpha=alpha, beta=alpha * tau, reduction="none"
    )
    assert (best <= value + 1e-9 * (1 + value.abs())).all()


@pytest.mark.parametrize("case", LINEAR, ids=lambda c: c.name)
@quick
@given(shapes, st.floats(0, 1))
def test_linear_in_the_label(case, shape, mix):
    """A mixed label gives the mixed loss; a one-hot label gives that of the index."""
    logits, target = batch(*shape)
    other = target.roll(1)
    extra = case.extra(logits)
    k = logits.shape[-1]
    one, two = (torch.nn.functional.one_hot(t, k).double() for t in (target, other))

    def value(t):
        return case(logits, t, reduction="none", extra=extra)

    torch.testing.assert_close(value(one), value(target))
    torch.testing.assert_close(
        value(mix * one + (1 - mix) * two), mix * value(target) + (1 - mix) * value(other)
    )


@pytest.mark.parametrize("case", [c for c in LOSS_CASES if not c.linear], ids=lambda c: c.name)
def test_losses_not_linear_in_the_label_say_so(case):
    logits, _ = batch(0, 3, 4)
    with pytest.raises(ValueError, match="not linear in the label"):
        case(logits, logits.softmax(-1))


def masked(case, logits, target, column):
    """The same samples with class ``column`` masked, and with it taken away."""
    keep = [j for j in range(logits.shape[-1]) if j != column]
    fewer = target - (target > column).long()
    return logits.index_fill(-1, torch.tensor(column), -math.inf), logits[:, keep], fewer


WITHOUT = [
    case
    for case in LOSS_CASES
    # K itself, or a table or mask over K classes, is part of these
    if case.name.split("-")[0] not in ("labo", "tfreg", "ols", "krls", "mls", "wls", "topk")
    and case.name not in ("ls-joeynmt", "kd-elementwise", "rdrop-labo")
]


@pytest.mark.parametrize("case", WITHOUT, ids=lambda c: c.name)
def test_masked_class_is_not_there(case):
    logits, target = batch(2, 6, 7)
    target = target.masked_fill(target == 3, 4)
    with_mask, without, fewer = masked(case, logits, target, column=3)
    value = case(with_mask, target, extra=case.extra(logits))
    expected = case(without, fewer, extra=case.extra(without))
    torch.testing.assert_close(value, expected)


@each_loss
def test_masked_classes_are_finite_and_get_no_gradient(case):
    logits, target = batch(2, 6, 7)
    target = target.masked_fill((target == 3) | (target == 5), 4)
    logits[:, [3, 5]] = -math.inf
    extra = case.extra(torch.nan_to_num(logits, neginf=0.0))
    value = case(logits, target, extra=extra, reduction="none")
    slope = gradient(lambda z: case(z, target, extra=extra), logits)
    assert value.isfinite().all()
    assert slope.isfinite().all()
    assert slope[:, [3, 5]].count_nonzero() == 0
    assert slope.abs().sum() > 0


def test_masked_label_is_infinite():
    logits = torch.tensor([[-math.inf, 0.0, 1.0]])
    target = torch.tensor([0])
    assert F.cross_entropy_loss(logits, target) == math.inf
    assert F.labo_loss(logits, target) == math.inf


def test_smoothing_on_a_masked_class_is_infinite():
    """Mass that the caller puts on an impossible class is not hidden."""
    logits = torch.tensor([[0.0, 1.0, -math.inf]])
    prior = torch.full((1, 3), 1 / 3)
    value = F.smoothed_cross_entropy(logits, torch.tensor([0]), prior, alpha=0.1)
    assert value == math.inf
    value = F.smoothed_cross_entropy(
        logits, torch.tensor([0]), torch.tensor([[0.5, 0.5, 0.0]]), alpha=0.1
    )
    assert value.isfinite()


def test_per_sample_alpha_and_beta():
    logits, target = batch(4, 3, 5)
    p_ls = batch(9, 3, 5)[0].softmax(-1)
    alpha, beta = torch.tensor([0.1, 0.5, 0.9]).double(), torch.tensor([0.0, 0.3, 2.0]).double()
    value = F.smoothed_cross_entropy(logits, target, p_ls, alpha=alpha, beta=beta, reduction="none")
    for i in range(3):
        alone = F.smoothed_cross_entropy(
            logits[i], target[i], p_ls[i], alpha=alpha[i].item(), beta=beta[i].item()
        )
        torch.testing.assert_close(value[i], alone)


def test_beta_smoothing_ranks_only_rows_that_count():
    logits, target = batch(6, 5, 4)
    ema, _ = batch(7, 5, 4)
    draws = torch.tensor([0.9, 0.2, 0.6, 0.4, 0.7]).double()
    target[1] = -100
    keep = [0, 2, 3, 4]
    torch.testing.assert_close(
        F.beta_smoothing_loss(logits, target, ema, draws=draws),
        F.beta_smoothing_loss(logits[keep], target[keep], ema[keep], draws=draws[keep]),
    )


def test_beta_smoothing_draws_follow_the_distribution():
    """Beta(3, 1) has mean 3/4; the mean label of the class is what it says."""
    logits, target = torch.zeros(20_000, 4), torch.zeros(20_000, dtype=torch.long)
    rng = torch.Generator().manual_seed(0)
    logits[:, 0] = 1.0
    low = -logits.log_softmax(-1)
    expected = 0.75 * low[0, 0] + 0.25 * low[0, 1]
    value = F.beta_smoothing_loss(logits, target, logits, alpha=1.0, rng=rng)
    torch.testing.assert_close(value, expected, atol=5e-3, rtol=0)
    again = F.beta_smoothing_loss(
        logits, target, logits, alpha=1.0, rng=torch.Generator().manual_seed(0)
    )
    assert torch.equal(value, again)


def test_generalized_entropy_prior():
    logits, target = batch(6, 5, 4)
    prior = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    p = logits.softmax(-1)
    ce = F.cross_entropy_loss(logits, target, reduction="none")
    for alpha, divergence in (
        (0.0, (p * (p / prior).log()).sum(-1)),
        (1.0, (prior * (prior / p).log()).sum(-1)),
    ):
        value = F.generalized_entropy_loss(
            logits, target, alpha=alpha, beta=0.5, prior=prior, reduction="none"
        )
        torch.testing.assert_close(value, ce + 0.5 * divergence)
        near = min(max(alpha, 1e-6), 1 - 1e-6)
        close = F.generalized_entropy_loss(
            logits, target, alpha=near, beta=0.5, prior=prior, reduction="none"
        )
        torch.testing.assert_close(close, value, atol=1e-4, rtol=0)


def test_generalized_entropy_at_alpha_0_needs_a_positive_prior():
    """KL(p || u) is infinite where the prior is 0; its gradient would be NaN."""
    logits, target = batch(6, 5, 4)
    prior = torch.tensor([0.5, 0.0, 0.25, 0.25], dtype=torch.float64)
    with pytest.raises(ValueError, match="at alpha=0 the prior must be above 0 for every class"):
        F.generalized_entropy_loss(logits, target, alpha=0, prior=prior)
    for alpha in (1e-3, 0.5, 1.0):
        slope = gradient(
            lambda z, a=alpha: F.generalized_entropy_loss(z, target, alpha=a, prior=prior), logits
        )
        assert slope.isfinite().all()
    F.generalized_entropy_loss(logits, target, alpha=0, prior=prior, generator="euclidean")


def test_generalized_entropy_at_alpha_0_with_a_masked_class():
    """A class that is masked may have a prior of 0; in ignored rows nothing is checked."""
    logits, target = batch(6, 5, 4)
    prior = torch.tensor([0.5, 0.0, 0.25, 0.25], dtype=torch.float64)
    logits[:, 1] = -math.inf
    target = target.masked_fill(target == 1, 2)
    logits[2, 1], target[2] = 0.3, -100
    slope = gradient(lambda z: F.generalized_entropy_loss(z, target, alpha=0, prior=prior), logits)
    assert slope.isfinite().all()
    keep, rows = [0, 2, 3], [0, 1, 3, 4]
    expected = gradient(
        lambda z: F.generalized_entropy_loss(
            z, (target - (target > 1).long())[rows], alpha=0, prior=prior[keep]
        ),
        logits[rows][:, keep],
    )
    torch.testing.assert_close(slope[rows][:, keep], expected)
