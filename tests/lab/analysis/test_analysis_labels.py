"""Figure 1c has the labels of labo.smoothing; and the curves of training."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labo import smoothing
from labo.lab.analysis.labels import DISTRIBUTIONS, shown_labels, smoothed_labels
from labo.lab.analysis.run import alpha_curve, training_curves

logit = st.floats(-30, 30)


@settings(deadline=None)
@given(
    st.lists(logit, min_size=1, max_size=8),
    st.integers(0, 7),
    st.floats(1.0, 5.0),
    st.floats(0, 1),
    st.none() | st.floats(0, 1),
)
def test_the_labels_are_those_the_losses_use(values, target, tau, rho, alpha):
    target %= len(values)
    z, y = torch.tensor(values, dtype=torch.float64), torch.tensor(target)
    found = smoothed_labels(np.array(values), target, tau=tau, rho=rho, alpha=alpha)
    fixed = None if alpha is None else torch.tensor(alpha, dtype=torch.float64)
    strength = smoothing.adaptive_alpha(z, rho) if fixed is None else fixed
    expected = {
        "prediction": z.softmax(-1),
        "one_hot": torch.nn.functional.one_hot(y, len(values)),
        "ls": smoothing.smoothed_target(y, smoothing.uniform(z), 0.1),
        "labo": smoothing.smoothed_target(y, smoothing.tempered(z, tau), strength),
    }
    assert tuple(expected) == DISTRIBUTIONS
    assert found["alpha"] == pytest.approx(float(strength), abs=1e-12)
    for name, label in expected.items():
        np.testing.assert_allclose(found[name], label.numpy(), atol=1e-12)
        assert found[name].sum() == pytest.approx(1)


def test_a_masked_class_gets_no_mass():
    logits = [1.0, -math.inf, 0.0]
    found = smoothed_labels(np.array(logits), 0)
    z = torch.tensor(logits, dtype=torch.float64)
    np.testing.assert_allclose(
        found["labo"],
        smoothing.smoothed_target(
            torch.tensor(0), smoothing.tempered(z), smoothing.adaptive_alpha(z)
        ),
    )
    assert found["ls"].tolist() == pytest.approx([0.95, 0, 0.05])


def test_what_is_shown_and_what_is_left():
    logits = np.array([0.0, 5.0, 1.0, 2.0, 3.0])
    found = shown_labels(logits, 0, list("abcde"), top=2)
    assert found["classes"] == ["b", "e", "a"]
    assert found["target"] == 2
    assert found["one_hot"] == [0, 0, 1]
    for name in DISTRIBUTIONS:
        assert sum(found[name]) + found["rest"][name] == pytest.approx(1)
    assert found["rest"]["ls"] == pytest.approx(0.1 * 2 / 5)
    everything = shown_labels(logits, 1, list("abcde"))
    assert everything["classes"] == ["b", "e", "d", "c", "a"]
    assert everything["rest"]["labo"] == pytest.approx(0, abs=1e-15)


# ------------------------------------------------------------------ training


def test_the_mean_alpha_is_exact():
    """alpha is linear in the entropy, so its mean follows from the mean entropy."""
    logits = torch.randn(50, 7, dtype=torch.float64) * 3
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1).mean().item()
    expected = smoothing.adaptive_alpha(logits, 0.8).mean().item()
    found = alpha_curve([entropy], 7, {"name": "labo", "rho": 0.8})
    assert found == [pytest.approx(expected, abs=1e-12)]
    assert alpha_curve([0.0, None], 1, {"name": "labo"}) == [1.0, None]


def test_the_alpha_a_run_used_or_would_have_used():
    entropy = [math.log(4) / 2]
    assert alpha_curve(entropy, 4, {"name": "labo", "alpha": "adaptive", "rho": 1.0}) == [0.5]
    assert alpha_curve(entropy, 4, {"name": "kd", "alpha": 0.9}) == [0.75]


def test_curves_have_columns_of_one_length():
    lines = [
        {"step": 1, "epoch": 1, "loss": 3.0, "lr": 0.1, "seconds": 1.0},
        {"step": 2, "epoch": 1, "valid": {"nll": 2.0}},
        {"step": 4, "epoch": 2, "valid": {"nll": 1.0, "bleu": 20.0}},
    ]
    found = training_curves(lines)
    assert found["loss"] == {"step": [1], "loss": [3.0]}
    assert found["valid"] == {"step": [2, 4], "nll": [2.0, 1.0], "bleu": [None, 20.0]}
    assert training_curves([])["valid"] == {"step": []}


def test_a_long_curve_is_thinned_and_keeps_its_ends():
    lines = [{"step": step, "epoch": 1, "loss": 1 / step, "lr": 1.0} for step in range(1, 5001)]
    steps = training_curves(lines)["loss"]["step"]
    assert len(steps) == 500
    assert (steps[0], steps[-1]) == (1, 5000)
