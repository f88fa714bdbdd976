"""Calibration errors and temperature, against tables worked by hand, oracles and properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from sklearn.metrics import log_loss

from analysis_runs import drawn_images
from labo.calibration import ReliabilityBins
from labo.lab.analysis import calibration

# Of two bins: [0.25, 0.45] with one right of two; [0.5, 0.75, 1.0] with two right of three.
CONFIDENCE = np.array([0.25, 0.45, 0.5, 0.75, 1.0])
RIGHT = np.array([True, False, False, True, True])

# Few different confidences, so that many are equal, and any.
some = st.sampled_from([0.1, 0.4, 0.7, 1.0]) | st.floats(0, 1, allow_subnormal=False)
samples = st.lists(st.tuples(some, st.booleans()), min_size=1, max_size=60)


def arrays(pairs):
    confidence, right = zip(*pairs, strict=True)
    return np.array(confidence), np.array(right)


def test_worked_by_hand():
    assert calibration.ece(CONFIDENCE, RIGHT, bins=2) == pytest.approx((0.3 + 0.25) / 5)
    assert calibration.mce(CONFIDENCE, RIGHT, bins=2) == pytest.approx(0.15)
    # in order, cut 3 + 2: |1.2 - 1| and |1.75 - 2|
    assert calibration.adaptive_ece(CONFIDENCE, RIGHT, bins=2) == pytest.approx((0.2 + 0.25) / 5)
    diagram = calibration.reliability(CONFIDENCE, RIGHT, bins=2)
    assert diagram["edges"] == [0.0, 0.5, 1.0]
    assert diagram["count"] == [2, 3]
    assert diagram["confidence"] == pytest.approx([0.35, 0.75])
    assert diagram["accuracy"] == pytest.approx([0.5, 2 / 3])


def test_an_empty_bin_has_no_mean():
    diagram = calibration.reliability(np.array([1.0]), np.array([True]))
    assert diagram["count"] == [0] * 14 + [1]
    assert diagram["accuracy"] == [None] * 14 + [1.0]


def test_edges_belong_to_the_bin_above_and_the_last_bin_is_closed():
    index = calibration.bin_index(np.array([0.0, 1 / 3, 0.999999, 1.0]))
    assert index.tolist() == [0, 5, 14, 14]


def test_class_wise_ece_looks_at_every_class():
    p, labels = np.array([[0.6, 0.3, 0.1], [0.6, 0.3, 0.1]]), np.array([0, 2])
    # freq - conf per class: 1/2 - 0.6, 0 - 0.3, 1/2 - 0.1
    assert calibration.classwise_ece(p, labels) == pytest.approx((0.1 + 0.3 + 0.4) / 3)


def test_ece_is_that_of_the_training_loop():
    confidence, right = np.random.default_rng(0).random(500), np.arange(500) % 3 == 0
    theirs = ReliabilityBins.of(torch.from_numpy(confidence), torch.from_numpy(right))
    assert calibration.ece(confidence, right) == pytest.approx(theirs.expected_error, rel=1e-12)


@given(samples)
def test_ece_against_a_loop_over_bins(pairs):
    confidence, right = arrays(pairs)
    expected = 0.0
    for b in range(15):
        inside = [(c, r) for c, r in pairs if (b <= c * 15 < b + 1) or (b == 14 and c * 15 >= 15)]
        if inside:
            gap = sum(c for c, _ in inside) - sum(r for _, r in inside)
            expected += abs(gap) / len(pairs)
    assert calibration.ece(confidence, right) == pytest.approx(expected, abs=1e-12)


@given(samples, st.randoms(use_true_random=False))
def test_the_order_of_the_samples_does_not_matter(pairs, random):
    shuffled = pairs[:]
    random.shuffle(shuffled)
    for measure in (calibration.ece, calibration.adaptive_ece, calibration.mce):
        assert measure(*arrays(pairs)) == pytest.approx(measure(*arrays(shuffled)), abs=1e-12)


@given(samples)
def test_bounds_of_the_errors(pairs):
    confidence, right = arrays(pairs)
    error, gap = calibration.ece(confidence, right), abs(confidence.mean() - right.mean())
    assert gap - 1e-12 <= error <= calibration.mce(confidence, right) + 1e-12
    assert gap - 1e-12 <= calibration.adaptive_ece(confidence, right) <= 1


def test_equal_confidences_share_their_accuracy():
    right = np.array([True, True, False, False])
    for order in ([0, 1, 2, 3], [0, 2, 1, 3], [3, 2, 1, 0]):
        assert calibration.adaptive_ece(np.full(4, 0.5), right[order], bins=2) == 0


def test_a_perfectly_calibrated_set_has_no_error():
    confidence = np.repeat([0.25, 0.5, 0.75, 1.0], 4)
    right = np.array([1, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1], dtype=bool)
    assert calibration.ece(confidence, right) == 0
    assert calibration.mce(confidence, right) == 0
    assert calibration.adaptive_ece(confidence, right, bins=4) == 0


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("confidence", [0.0, 0.4, 1.0])
def test_a_single_record(confidence, right):
    found = calibration.confidence_measures(np.array([confidence]), np.array([right]))
    assert found["ece"] == found["mce"] == found["adaptive_ece"] == abs(right - confidence)
    assert found["underconfidence"] == right - confidence
    assert found["errors"] == (not right)
    assert found["confidence_on_errors"] == (None if right else confidence)
    assert found["confidence_on_right"] == (confidence if right else None)


def test_the_ece_of_chance_falls_with_the_number_of_samples():
    few, many = np.full(50, 0.7), np.full(5000, 0.7)
    # one bin: the mean of |binomial / n - 0.7| is sqrt(2 / pi) of its standard deviation
    expected = math.sqrt(2 / math.pi * 0.21 / 5000)
    assert calibration.ece_floor(many) == pytest.approx(expected, rel=0.15)
    assert calibration.ece_floor(few) > 5 * calibration.ece_floor(many)
    assert calibration.ece_floor(few) == calibration.ece_floor(few)


def test_proper_scores_against_scikit_learn():
    p, labels = drawn_images(200, 4)
    assert calibration.nll(np.log(p), labels) == pytest.approx(log_loss(labels, p))
    one_hot = np.eye(4)[labels]
    assert calibration.brier(p, labels) == pytest.approx(((p - one_hot) ** 2).sum(-1).mean())
    expected = -(p * np.log(p)).sum(-1)
    np.testing.assert_allclose(calibration.entropy(np.log(p)), expected)


def test_one_class_is_always_right_and_sure():
    log_p, labels = np.zeros((3, 1)), np.zeros(3, dtype=int)
    assert calibration.nll(log_p, labels) == calibration.brier(np.exp(log_p), labels) == 0
    assert calibration.classwise_ece(np.exp(log_p), labels) == 0
    assert calibration.fit_temperature(log_p, labels) is None


# ------------------------------------------------------------------ temperature


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 4.0])
def test_the_temperature_of_calibrated_data_undoes_the_sharpening(sharpness):
    p, labels = drawn_images(20_000, 5, sharpness=sharpness)
    log_p = np.log(np.maximum(p, 1e-45))
    temperature = calibration.fit_temperature(log_p, labels)
    assert temperature == pytest.approx(sharpness, rel=0.05)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000), st.integers(2, 6), st.floats(0.1, 10))
def test_the_temperature_is_the_minimum_that_scipy_finds(seed, classes, sharpness):
    p, labels = drawn_images(60, classes, sharpness=sharpness, seed=seed)
    log_p = np.log(np.maximum(p, 1e-45))
    found = calibration.fit_temperature(log_p, labels)

    def score(log_t):
        return calibration.nll(calibration.tempered(log_p, math.exp(log_t)), labels)

    reach = (math.log(0.01), math.log(100))
    theirs = minimize_scalar(score, bounds=reach, method="bounded", options={"xatol": 1e-10})
    if found is None:  # no minimum inside: one of the ends is at least as good
        assert min(score(reach[0]), score(reach[1])) <= theirs.fun + 1e-9
    else:
        assert score(math.log(found)) <= theirs.fun + 1e-12
        again = calibration.fit_temperature(calibration.tempered(log_p, found), labels)
        assert again == pytest.approx(1, abs=1e-6)


def test_no_temperature_can_be_fitted_where_all_is_right_or_all_is_wrong():
    log_p = np.log([[0.7, 0.3], [0.6, 0.4]])
    assert calibration.fit_temperature(log_p, np.array([0, 0])) is None
    assert calibration.fit_temperature(log_p, np.array([1, 1])) is None


def test_a_temperature_does_not_change_the_predictions():
    p, _ = drawn_images(100, 4)
    for temperature in (0.2, 3.0):
        scaled = calibration.tempered(np.log(p), temperature)
        assert (scaled.argmax(-1) == p.argmax(-1)).all()
        np.testing.assert_allclose(np.exp(scaled).sum(-1), 1)


def test_a_temperature_with_classes_of_probability_0():
    """They change nothing: the temperature is that of the classes that are left."""
    p, labels = drawn_images(200, 4)
    log_p = np.log(p)
    masked = np.concatenate([log_p, np.full((200, 2), -np.inf)], axis=1)
    found = calibration.fit_temperature(masked, labels)
    assert found == pytest.approx(calibration.fit_temperature(log_p, labels), rel=1e-9)


def test_no_temperature_can_be_fitted_to_a_label_of_probability_0():
    """The NLL is infinite at every temperature."""
    p, labels = drawn_images(200, 4)
    log_p = np.log(p)
    log_p[3, labels[3]] = -np.inf
    assert calibration.fit_temperature(log_p, labels) is None


def test_entropy_with_classes_of_probability_0():
    log_p = np.array([[math.log(0.5), math.log(0.5), -np.inf], [0.0, -np.inf, -np.inf]])
    np.testing.assert_allclose(calibration.entropy(log_p), [math.log(2), 0.0])
