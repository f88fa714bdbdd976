"""Distillation from stored classes beside the divergence to the whole teacher: docs/methods.md."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from labo.functional import topk_distillation_loss

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
    return topk_distillation_loss(
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
    found = divergence(logits, log_t, tail)
    assert (found > whole + 1e-3).any()
    assert (found < whole - 1e-3).any()
    bucket = divergence(logits, log_t, "bucket")
    assert bool((found >= bucket - 1e-12).all()) == (tail in ("uniform", "labo"))
    assert bool((found < 0).any()) == (tail == "drop")


def test_labo_at_tau_1_is_bucket(rows):
    logits, log_t, _ = rows
    torch.testing.assert_close(
        divergence(logits, log_t, "labo", tau=1.0), divergence(logits, log_t, "bucket")
    )


def test_renormalize_is_above_0_where_the_model_is_the_teacher(rows):
    _, log_t, _ = rows
    assert (divergence(log_t, log_t, "renormalize") > 0).all()
    for tail in ("bucket", "labo"):
        at_one = divergence(log_t, log_t, tail, tau=1.0)
        torch.testing.assert_close(at_one, torch.zeros_like(at_one), atol=1e-12, rtol=0)
