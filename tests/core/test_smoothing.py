"""Distributions, alphas, the confidence they lead to, and the objective with any of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from labo import functional as F
from labo import smoothing

LOGITS = torch.randn(3, 2, 7, generator=torch.Generator().manual_seed(0))
TARGET = torch.tensor([[0, 1], [2, 3], [6, 5]])
TABLE = torch.eye(7)

DISTRIBUTIONS = {
    "uniform": lambda z, y: smoothing.uniform(z),
    "others": smoothing.others,
    "others, padding": lambda z, y: smoothing.others(z, y, padding_idx=4),
    "tempered": lambda z, y: smoothing.tempered(z, 1.3),
    "virtual_teacher": smoothing.virtual_teacher,
    "class_table": lambda z, y: smoothing.class_table(smoothing.tempered(TABLE.to(z), 1.0), y, z),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_row_is_a_distribution(name, dtype):
    logits = LOGITS.to(dtype).clone()
    logits[0, 0, 5] = -math.inf
    p = DISTRIBUTIONS[name](logits, TARGET)
    assert p.shape == LOGITS.shape
    assert p.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (p >= 0).all()
    torch.testing.assert_close(p.sum(-1), torch.ones(3, 2, dtype=p.dtype))
    assert p[0, 0, 5] == 0


def test_others_leaves_label_and_padding_out():
    p = smoothing.others(LOGITS, TARGET, padding_idx=4)
    assert p.gather(-1, TARGET.unsqueeze(-1)).count_nonzero() == 0
    assert p[..., 4].count_nonzero() == 0
    assert set(p.flatten().tolist()) == {0.0, torch.tensor(0.2).item()}


def test_smoothed_target_refuses():
    p = smoothing.uniform(LOGITS)
    with pytest.raises(ValueError, match=r"target 9 at position \(0, 0\) is outside \[0, 7\)"):
        smoothing.smoothed_target(TARGET.index_fill(0, torch.tensor(0), 9), p, 0.1)
    with pytest.raises(ValueError, match="alpha must be"):
        smoothing.smoothed_target(TARGET, p, 1.5)
    with pytest.raises(ValueError, match="alpha must lie"):
        smoothing.smoothed_target(TARGET, p, torch.full((3, 2), -0.1))


def test_smoothed_target_of_probabilities():
    label = LOGITS.flip(-1).softmax(-1)
    p = smoothing.smoothed_target(label, smoothing.uniform(LOGITS), 0.25)
    torch.testing.assert_close(p, 0.75 * label + 0.25 / 7)


STATIONARY = {
    (1.05, "adaptive", 0.5): (0.864, 0.758, 0.677, 0.617, 0.591),
    (1.15, "adaptive", 0.5): (0.735, 0.587, 0.503, 0.451, 0.433),
    (1.25, "adaptive", 0.5): (0.670, 0.519, 0.444, 0.404, 0.391),
    (1.25, "adaptive", 1.0): (0.800, 0.684, 0.619, 0.580, 0.567),
    (2.0, 0.1, 0.5): (0.963, 0.926, 0.909, 0.903, 0.902),
    (1.25, 0.5, 0.5): (0.881, 0.739, 0.644, 0.587, 0.568),
}


@pytest.mark.parametrize(("tau", "alpha", "rho"), STATIONARY)
def test_stationary_confidence_table(tau, alpha, rho):
    for k, expected in zip(
        (10, 100, 1000, 10_000, 32_000), STATIONARY[tau, alpha, rho], strict=True
    ):
        value = smoothing.stationary_confidence(k, tau=tau, alpha=alpha, rho=rho)
        assert value == pytest.approx(expected, abs=6e-4)


@settings(max_examples=60, deadline=None)
@given(st.floats(1.001, 50), st.integers(2, 50_000), st.floats(0.05, 0.95), st.booleans())
def test_tau_for_confidence_inverts(tau, k, strength, adaptive):
    setting = {"rho": strength} if adaptive else {"alpha": strength}
    p = smoothing.stationary_confidence(k, tau=tau, **setting)
    chosen = smoothing.tau_for_confidence(p, k, **setting)
    again = smoothing.stationary_confidence(k, tau=chosen, **setting)
    assert again == pytest.approx(p, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.floats(1.01, 20), st.integers(2, 10_000), st.floats(0.05, 1))
def test_stationary_point_has_no_gradient(tau, k, alpha):
    p = smoothing.stationary_confidence(k, tau=tau, alpha=alpha)
    star = p ** (1 / tau) / (p ** (1 / tau) + (k - 1) * ((1 - p) / (k - 1)) ** (1 / tau))
    assert (1 - alpha) + alpha * star == pytest.approx(p, rel=1e-6)


def test_nothing_holds_the_model_back():
    assert smoothing.stationary_confidence(10, tau=1.0) == 1.0
    assert smoothing.stationary_confidence(10, tau=0.5) == 1.0
    assert smoothing.stationary_confidence(10, alpha=0.0) == 1.0
    assert smoothing.stationary_confidence(1) == 1.0
    assert smoothing.tau_for_confidence(1.0, 10) == 1.0


@settings(max_examples=60, deadline=None)
@given(st.floats(1.01, 20), st.integers(2, 10_000), st.floats(0.05, 1))
def test_stationary_label_weight_is_that_of_the_prediction(tau, k, rho):
    p = smoothing.stationary_confidence(k, tau=tau, rho=rho)
    prediction = torch.full((k,), (1 - p) / (k - 1), dtype=torch.float64)
    prediction[0] = p
    kept = 1 - smoothing.adaptive_alpha(prediction.log(), rho)
    value = smoothing.stationary_label_weight(k, tau=tau, rho=rho)
    assert value == pytest.approx(float(kept), rel=1e-6)


def test_stationary_label_weight_at_its_limits():
    assert smoothing.stationary_label_weight(10, alpha=0.3) == pytest.approx(0.7)
    assert smoothing.stationary_label_weight(10, alpha=0.0) == 1.0
    assert smoothing.stationary_label_weight(10, tau=1.0) == 0.0
    assert smoothing.stationary_label_weight(1) == 0.0


def test_infinite_tau_is_label_smoothing():
    value = smoothing.stationary_confidence(10, tau=math.inf, alpha=0.1)
    assert value == pytest.approx(1 - 0.1 + 0.1 / 10)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: smoothing.tau_for_confidence(0.2, 10), "it stays above 0.4648"),
        (lambda: smoothing.tau_for_confidence(0.85, 10, alpha=0.1), "alpha=0.1.*above 0.9100"),
        (lambda: smoothing.tau_for_confidence(0.9, 10, alpha=0.0), "no tau gives"),
        (lambda: smoothing.tau_for_confidence(0.05, 10), r"p must lie in \(1/K, 1\]"),
        (lambda: smoothing.tau_for_confidence(1.2, 10), "p must lie in"),
        (lambda: smoothing.tau_for_confidence(0.9, 1), "with one class"),
        (lambda: smoothing.stationary_confidence(0), "num_classes must be 1 or more"),
        (lambda: smoothing.stationary_confidence(10, tau=0), "tau must be"),
        (lambda: smoothing.stationary_confidence(10, rho=2), "rho must be"),
        (lambda: smoothing.tempered(LOGITS, -1.0), "tau must be"),
        (lambda: smoothing.adaptive_alpha(LOGITS, 2.0), "rho must be"),
    ],
)
def test_refuses(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


# ------------------------------------------------------------------ smoothed_cross_entropy


ALPHA = torch.tensor([0.1, 0.3, 0.7, 0.9], dtype=torch.float64)
BETA = torch.tensor([0.3, 0.0, 1.1, 0.1], dtype=torch.float64)
SCORES = 2 * torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
LABELS = torch.tensor([2, 5, 0, 2])


def test_strengths_per_sample_are_those_of_the_oracle():
    p = SCORES.flip(-1).softmax(-1)
    values = F.smoothed_cross_entropy(SCORES, LABELS, p, alpha=ALPHA, beta=BETA, reduction="none")
    z, q, w = oracle.real(SCORES.numpy()), oracle.real(p.numpy()), oracle.real(np.ones(6))
    for i, y in enumerate(LABELS.tolist()):
        exact = oracle.smoothed(z[i], y, w, q[i], oracle.real(ALPHA[i].item()))
        exact += oracle.real(BETA[i].item()) * oracle.kl(q[i], 1 / oracle.real(6))
        assert values[i].item() == pytest.approx(float(exact), rel=1e-12)
        numbers = {"alpha": ALPHA[i].item(), "beta": BETA[i].item()}
        alone = F.smoothed_cross_entropy(SCORES[i], LABELS[i], p[i], **numbers)
        torch.testing.assert_close(values[i], alone)


def test_mass_on_a_masked_class_is_infinite():
    """What the caller puts on an impossible class is not hidden, unless it has no share."""
    logits, target = torch.tensor([[0.0, 1.0, -math.inf]]), torch.tensor([0])
    prior = torch.full((1, 3), 1 / 3)
    assert F.smoothed_cross_entropy(logits, target, prior, alpha=0.1) == math.inf
    elsewhere = torch.tensor([[0.5, 0.5, 0.0]])
    assert F.smoothed_cross_entropy(logits, target, elsewhere, alpha=0.1).isfinite()
    value = F.smoothed_cross_entropy(logits, target, prior, alpha=0.0)
    torch.testing.assert_close(value, F.cross_entropy_loss(logits, target))


def test_refuses_wrong_smoothing():
    uniform = smoothing.uniform(SCORES)

    def objective(p_ls, **arguments):
        return F.smoothed_cross_entropy(SCORES, LABELS, p_ls, **({"alpha": 0.1} | arguments))

    with pytest.raises(ValueError, match="smoothing must have the shape of the logits"):
        objective(uniform[0])
    with pytest.raises(ValueError, match="smoothing must be probabilities"):
        objective(2 * uniform)
    with pytest.raises(ValueError, match=r"alpha must be a number or have the shape \(4,\)"):
        objective(uniform, alpha=torch.zeros(3))
    with pytest.raises(ValueError, match=r"alpha must lie in \[0, 1\]"):
        objective(uniform, alpha=torch.tensor([0.1, 0.2, -0.3, 0.4]))
