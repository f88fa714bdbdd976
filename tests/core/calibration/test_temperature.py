"""The fitted temperature: the minimum that scipy finds, processes, and data without a minimum."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

from drawn_labels import drawn, pairs
from labo import calibration


def nll(logits, labels, temperature):
    log_p = log_softmax(logits / temperature, -1)
    return -log_p[np.arange(len(labels)), labels].mean()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    classes=st.integers(2, 6),
    sharpness=st.floats(0.05, 20),
    masked=st.booleans(),
)
def test_the_temperature_is_the_minimum_that_scipy_finds(seed, classes, sharpness, masked):
    logits, target = drawn(seed, 60, classes, sharpness=sharpness, masked=masked)
    scores, labels = logits.numpy(), target.numpy()
    try:
        fit = calibration.fit_temperature(logits, target)
    except calibration.TemperatureError:
        ends = [nll(scores, labels, T) for T in (1e-9 * sharpness, 1e9 * sharpness)]
        inside = [nll(scores, labels, sharpness * T) for T in np.geomspace(1e-3, 1e3, 61)]
        assert min(ends) <= min(inside) + 1e-9
        return
    log_t = math.log(fit.temperature)
    found = minimize_scalar(
        lambda u: nll(scores, labels, math.exp(u)),
        bounds=(log_t - 2, log_t + 2),
        method="bounded",
        options={"xatol": 1e-10},
    )
    assert fit.nll_after <= found.fun + 1e-13
    assert log_t == pytest.approx(found.x, abs=1e-5)  # as near as values of a minimum can tell
    assert fit.nll_before == pytest.approx(nll(scores, labels, 1.0), rel=1e-12)
    assert fit.nll_after == pytest.approx(nll(scores, labels, fit.temperature), rel=1e-12)
    assert fit.nll_after <= fit.nll_before + 1e-15
    assert fit.count == 60
    again = calibration.fit_temperature(logits / fit.temperature, target)
    assert again.temperature == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 4.0])
def test_the_temperature_of_drawn_labels_undoes_the_sharpening(sharpness):
    logits, target = drawn(0, 20_000, 5, sharpness=sharpness)
    fit = calibration.fit_temperature(logits, target)
    assert fit.temperature == pytest.approx(sharpness, rel=0.05)
    after = calibration.expected_calibration_error(logits, target, temperature=fit.temperature)
    assert after < 0.01


@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1e4, 1e12, 1e30])
def test_the_scale_of_the_logits(scale):
    logits, target = drawn(0, 200, 5)
    exact = calibration.fit_temperature(logits, target)
    fit = calibration.fit_temperature(logits * scale, target)
    assert fit.temperature == pytest.approx(scale * exact.temperature, rel=1e-9)
    assert fit.nll_after == pytest.approx(exact.nll_after, rel=1e-12)
    rounded = calibration.fit_temperature((logits * scale).float(), target)
    assert rounded.temperature == pytest.approx(scale * exact.temperature, rel=1e-5)


def test_several_processes_sum_their_shares():
    logits, target = drawn(0, 60, 4, sharpness=2.0)
    whole = calibration.fit_temperature(logits, target)
    # What the other process would send, pass by pass: recorded from a fit of the whole.
    sums: list[torch.Tensor] = []
    calibration.fit_temperature(logits, target, reduce=lambda x: sums.append(x.clone()) or x)
    sent = iter(sums)
    found = calibration.fit_temperature(
        [(logits[:0], target[:0])], reduce=lambda mine: mine + next(sent)
    )
    assert found == whole


@pytest.mark.parametrize("sharpness", [0.5, 1.0, 2.0])
def test_few_passes_are_enough(sharpness):
    logits, target = drawn(0, 500, 10, sharpness=sharpness)
    passes = []
    calibration.fit_temperature(lambda: passes.append(1) or [(logits, target)])
    assert len(passes) <= 5


@pytest.mark.parametrize(
    ("logits", "target", "sentence"),
    [
        (pairs(0.7, 0.6), [0, 0], "all 2 predictions are right.* as T does"),
        (pairs(0.7, 0.6), [1, 1], "NLL falls as T grows"),
        (pairs(0.7, 0.7), [0, 1], "NLL falls as T grows"),
        (pairs(0.5, 0.5), [0, 1], "all equal"),
        (torch.zeros(3, 1), [0, 0, 0], "all equal"),
    ],
)
def test_no_minimum(logits, target, sentence):
    with pytest.raises(calibration.TemperatureError, match=sentence):
        calibration.fit_temperature(logits, torch.tensor(target))


def test_what_a_fit_cannot_use():
    logits, target = drawn(0, 50, 3)
    with pytest.raises(TypeError, match="an iterator can be read once"):
        calibration.fit_temperature((part, target[:10]) for part in logits.split(10))
    with pytest.raises(ValueError, match="a label has the logit -inf"):
        calibration.fit_temperature(
            logits.masked_fill(torch.arange(3) == target[0], -math.inf), target
        )
    drop = torch.nn.Dropout(0.5)
    with pytest.raises(ValueError, match=r"is the model in eval mode\?"):
        calibration.fit_temperature(lambda: [(drop(logits), target)])
    remaining = [[(logits, target)] * 2, [(logits, target)]]
    with pytest.raises(ValueError, match="the batches changed"):
        calibration.fit_temperature(lambda: remaining.pop(0))
