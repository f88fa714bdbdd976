"""Losses with a second prediction: distillation, stored classes, R-Drop."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

import labo
from labo import functional as F
from labo import smoothing
from loss_cases import batch, gradient
from worked import BATCH, TARGETS, Y0, A, T, near

# ------------------------------------------------------------------ stored classes: docs/methods.md


ROWS, CLASSES, K = 2000, 6, 2


@pytest.fixture(scope="module")
def rows() -> tuple[Tensor, Tensor, Tensor]:
    """Logits of models, log-probabilities of teachers, and the divergences between them."""
    rng = torch.Generator().manual_seed(0)
    scale = 3 * torch.rand(2, ROWS, 1, generator=rng, dtype=torch.float64)
    logits, taught = scale * torch.randn(2, ROWS, CLASSES, generator=rng, dtype=torch.float64)
    taught[::4] = logits[::4] + 0.05 * taught[::4]  # some models are near their teachers
    log_t, log_p = taught.log_softmax(-1), logits.log_softmax(-1)
    return logits, log_t, (log_t.exp() * (log_t - log_p)).sum(-1)


def divergence(logits: Tensor, log_t: Tensor, tail: str, tau: float = 1.25) -> Tensor:
    top = log_t.topk(K)
    target = torch.zeros(len(logits), dtype=torch.int64)
    return F.topk_distillation_loss(
        logits, target, top.indices, top.values, alpha=1.0, tail=tail, tau=tau, reduction="none"
    )


def test_bucket_is_a_lower_bound_and_has_an_upper_bound_beside_it(rows):
    logits, log_t, whole = rows
    bucket = divergence(logits, log_t, "bucket")
    assert (bucket <= whole + 1e-12).all()
    outside = torch.ones_like(log_t, dtype=torch.bool).scatter(1, log_t.topk(K).indices, False)
    mass = (log_t.exp() * outside).sum(-1)
    log_pi = logits.masked_fill(~outside, -torch.inf).log_softmax(-1)
    upper = bucket + mass * (-log_pi.masked_fill(~outside, torch.inf).amin(-1))
    assert (whole <= upper + 1e-12).all()
    assert (whole > bucket + 0.9 * (upper - bucket)).any()  # neither bound is far off everywhere
    assert (whole < bucket + 0.01 * (upper - bucket)).any()


@pytest.mark.parametrize("tail", ["uniform", "labo", "drop", "renormalize"])
def test_the_other_tails_are_neither(rows, tail):
    logits, log_t, whole = rows
    value = divergence(logits, log_t, tail)
    assert (value > whole + 1e-3).any()
    assert (value < whole - 1e-3).any()
    bucket = divergence(logits, log_t, "bucket")
    assert bool((value >= bucket - 1e-12).all()) == (tail in ("uniform", "labo"))
    assert bool((value < 0).any()) == (tail == "drop")


def test_renormalize_is_above_0_where_the_model_is_the_teacher(rows):
    _, log_t, _ = rows
    assert (divergence(log_t, log_t, "renormalize") > 0).all()
    for tail in ("bucket", "labo"):
        at_one = divergence(log_t, log_t, tail, tau=1.0)
        torch.testing.assert_close(at_one, torch.zeros_like(at_one), atol=1e-12, rtol=0)


def test_distillation():
    near(F.distillation_loss(A, Y0, T, alpha=1.0, tau=4), 0.094983)
    near(F.distillation_loss(A, Y0, T, alpha=1.0, tau=4, multiplier=1 / 16), 0.005936)
    near(F.distillation_loss(A, Y0, T, alpha=0.9, tau=4), 0.130416)
    near(F.distillation_loss(A, Y0, T, kl_reduction="elementwise"), 0.066302)
    near(F.distillation_loss(A, Y0, T, alpha=0.5, tau=1), 0.263647)


def test_standardized_distillation():
    near(A.std(), 1.278997)
    near(T.std(), 1.512999)

    def kd(z, weight):
        hyper = {"alpha": 1.0, "tau": 2.0, "multiplier": weight, "standardize": True}
        return F.distillation_loss(z, Y0, T, **hyper)

    near(kd(A, 1.0), 0.029042)
    near(kd(A, 9.0), 0.261378)
    slope = gradient(lambda z: kd(z, 9.0), A)
    near(slope[0], -0.493656)
    near([slope.sum(), slope @ A], [0.0, 0.0])  # neither shift nor scale matters
    near(kd(3 * A + 5, 9.0), 0.261378)
    # The biased standard deviation would be another temperature.
    tau = 2 * math.sqrt(3 / 4)
    hyper = {"alpha": 1.0, "tau": tau, "multiplier": 9 * (2 / tau) ** 2, "standardize": True}
    near(F.distillation_loss(A, Y0, T, **hyper), 0.345312)


def test_standardized_distillation_of_constant_logits():
    """The gradient is bounded, and one class has nothing to learn."""
    flat = torch.ones(4, dtype=torch.float64)
    slope = gradient(lambda z: F.distillation_loss(z, Y0, T, standardize=True), flat)
    assert slope.abs().max() < 1e4
    assert F.distillation_loss(A[:1], Y0, T[:1], standardize=True) == 0


def test_decoupled_distillation():
    def dkd(z, alpha, beta, **hyper):
        hyper = {"hard_weight": 0.0, "alpha": alpha, "beta": beta} | hyper
        return F.decoupled_distillation_loss(z, Y0, T, **hyper)

    near(dkd(A, 1.0, 0.0), 0.082214)
    near(dkd(A, 0.0, 1.0), 0.021170)
    near(dkd(A, 1.0, 8.0), 0.251570)
    near(dkd(A, 1.0, 8.0, hard_weight=1.0), 0.251570 + 0.449313)
    near(gradient(lambda z: dkd(z, 1.0, 8.0), A)[:2], [-0.195068, 0.617210])
    u_y = (T / 4).softmax(-1)[0].item()
    near(dkd(A, 1.0, 1 - u_y), 0.094983)
    near(F.distillation_loss(A, Y0, T, alpha=1.0), 0.094983)


def test_decoupled_distillation_edges():
    """Two classes have no others, one class is nothing, and a confident student is finite."""

    def dkd(z, t, **hyper):
        return F.decoupled_distillation_loss(z, Y0, t, hard_weight=0.0, tau=1.0, **hyper)

    assert dkd(A[:2], T[:2], alpha=0.0) == 0
    assert dkd(A[:1], T[:1]) == 0
    sure = torch.tensor([200.0, 0.0, 0.0], dtype=torch.float32)
    value = dkd(sure, T[:3].float(), beta=0.0)
    u = T[:3].softmax(-1)[0].item()
    entropy = -(u * math.log(u) + (1 - u) * math.log1p(-u))
    assert value.item() == pytest.approx((1 - u) * (200 - math.log(2)) - entropy, rel=1e-5)
    only = torch.tensor([1.0, -math.inf, -math.inf, -math.inf], dtype=torch.float64)
    near(dkd(A, only), 0.449313)  # a teacher without other classes


def test_distillation_of_other_papers():
    tf_kd_self = {"alpha": 0.95, "tau": 6, "kl_reduction": "elementwise", "multiplier": 50}
    near(F.distillation_loss(A, Y0, T, **tf_kd_self), 1.090534)
    of_teacher_only = smoothing.tempered(T, 4.0)
    near(F.smoothed_cross_entropy(A, Y0, of_teacher_only, alpha=0.4), 0.893861)
    near(F.smoothed_cross_entropy(A, Y0, T.softmax(-1), alpha=0.5), 0.588535)
    selective = F.label_smoothing_loss(A, Y0) + F.distillation_loss(A, Y0, T, alpha=1.0, tau=1)
    near(selective, 0.674793)


TAILS = {
    "drop": (0.116718, 0.088352),
    "renormalize": (0.203182, 0.095435),
    "bucket": (0.076728, 0.039758),
    "uniform": (0.087428, 0.058329),
    "labo": (0.077088, 0.042981),
}


def stored(k: int) -> tuple[torch.Tensor, torch.Tensor]:
    top = T.log_softmax(-1).topk(k)
    return top.indices, top.values


@pytest.mark.parametrize("tail", TAILS)
def test_topk_distillation(tail):
    def topk(z, k=2, **hyper):
        hyper = {"alpha": 1.0, "tail": tail} | hyper
        return F.topk_distillation_loss(z, Y0, *stored(k), **hyper)

    value, slope = TAILS[tail]
    near(1 - stored(2)[1].exp().sum(), 0.074210)
    near(topk(A), value)
    near(gradient(topk, A)[2], slope)
    near(topk(A, alpha=0.5), 0.5 * value + 0.5 * 0.449313)
    # all classes stored: the whole KL divergence
    near(topk(A, k=4), 0.077980)
    near(gradient(lambda z: topk(z, k=4), A)[2], 0.045848)
    if tail == "labo":
        near(topk(A, tau=1.0), TAILS["bucket"][0])
        near(gradient(lambda z: topk(z, tau=1.0), A)[2], TAILS["bucket"][1])
        near(topk(A, tau=1e8), TAILS["uniform"][0])


def test_cs_kd():
    near(F.cs_kd_loss(A, Y0, T), 0.544296)
    near(F.cs_kd_loss(A, Y0, T, lam=3), 0.734261)


def test_beta_smoothing():
    draw = torch.tensor(0.8, dtype=torch.float64)
    near(F.beta_smoothing_loss(A, Y0, A, alpha=1.0, draws=draw), 0.842646)
    near(F.beta_smoothing_loss(A, Y0, A, alpha=0.6, draws=draw), 0.685313)


def test_beta_smoothing_batch():
    confidence = torch.tensor([0.9, 0.3], dtype=torch.float64)
    rest = (1 - confidence) / 3
    ema = rest.unsqueeze(-1).repeat(1, 4).scatter(1, TARGETS[:, None], confidence[:, None])
    for order in ([0.95, 0.55], [0.55, 0.95]):
        draws = torch.tensor(order, dtype=torch.float64)
        near(F.beta_smoothing_loss(BATCH, TARGETS, ema.log(), draws=draws), 1.369660)


def test_ps_kd():
    past = torch.tensor([0.7, 0.2, 0.06, 0.04], dtype=torch.float64)
    near(F.ps_kd_loss(A, Y0, past.log(), alpha=0.4), 0.622913)
    loss = labo.PSKDLoss(epochs=300, alpha=0.8)
    for _ in range(149):
        loss.end_epoch()
    near(loss(A, Y0, past.log()), 0.622913)


def test_r_drop():
    p, r = A.log_softmax(-1), T.log_softmax(-1)
    near((p.exp() * (p - r)).sum(), 0.091230)
    near((r.exp() * (r - p)).sum(), 0.077980)
    for first, second in ((A, T), (T, A)):
        near(F.r_drop_loss(first, Y0, second, lam=0, hard_weight=0), 0.0)
        near(F.r_drop_loss(first, Y0, second, hard_weight=0), (0.091230 + 0.077980) / 2)
    translation = {"lam": 5, "hard_weight": 1, "label": "smoothed", "alpha": 0.1}
    near(F.r_drop_loss(A, Y0, T, **translation), 1.431374)
    near(gradient(lambda z: F.r_drop_loss(z, Y0, T, **translation), A)[0], -1.267133)
    # Both passes get a gradient, and their order does not matter.
    first = gradient(lambda z: F.r_drop_loss(z, Y0, T, **translation), A)
    second = gradient(lambda z: F.r_drop_loss(T, Y0, z, **translation), A)
    torch.testing.assert_close(first, second)
    # The authors' image code: both directions summed over the batch, here of one sample.
    near(F.r_drop_loss(A, Y0, T, hard_weight=1, lam=2 * 0.3 * 1), 0.704112)


def test_r_drop_with_the_label_of_labo():
    """Without the divergence it is the mean of LABO's losses; two equal passes have none."""
    mean = (F.labo_loss(A, Y0) + F.labo_loss(T, Y0)) / 2
    near(F.r_drop_loss(A, Y0, T, lam=0, label="labo"), mean)
    near(F.r_drop_loss(A, Y0, A, lam=9, label="labo"), 1.120539)
    slope = gradient(lambda z: F.r_drop_loss(z, Y0, T, lam=0, label="labo"), A)
    near(slope, gradient(lambda z: F.labo_loss(z, Y0) / 2, A))


def test_strengths_that_grow_to_their_end():
    logits, target = batch(0, 7, 11)
    teacher = logits.flip(1)
    dkd = partial(labo.DecoupledDistillationLoss, multiplier=3.0)
    for loss, name, strengths in (
        (dkd(warmup_epochs=4), "multiplier", (0.75, 1.5, 2.25, 3.0, 3.0)),
        (dkd(warmup_epochs=0), "multiplier", (3.0, 3.0)),
        (dkd(warmup_epochs=1), "multiplier", (3.0, 3.0)),
        (labo.PSKDLoss(epochs=4, alpha=0.8), "alpha", (0.2, 0.4, 0.6, 0.8, 0.8)),
    ):
        function = getattr(F, loss.function_name)
        for strength in strengths:
            expected = function(logits, target, teacher, **{name: strength})
            torch.testing.assert_close(loss(logits, target, teacher), expected)
            loss.end_epoch()


def test_ps_kd_without_a_past_is_cross_entropy():
    logits, target = batch(0, 7, 11)
    expected = F.cross_entropy_loss(logits, target)
    torch.testing.assert_close(labo.PSKDLoss(epochs=4)(logits, target), expected)


def test_beta_smoothing_ranks_only_rows_that_count():
    logits, target = batch(0, 5, 4)
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


def test_topk_bucket_has_an_upper_bound():
    """The largest -log of the tail bounds the whole KL divergence from above."""
    value = F.topk_distillation_loss(A, Y0, *stored(2), alpha=1.0)
    mass = 1 - stored(2)[1].exp().sum()
    near(value - mass * A[2:].log_softmax(-1).min(), 0.179683)


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
