"""Views: the reliability diagram, risk and coverage, normalised logits, and intervals.

The measures of calibration themselves: tests/core/calibration.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis_runs import drawn_images
from labo.lab.analysis import selective
from labo.lab.analysis.significance import wilson
from labo.lab.analysis.views import underconfidence_interval, view

levels = st.sampled_from([0.1, 0.3, 0.5, 0.9, 1.0])
samples = st.lists(st.tuples(levels, st.booleans()), min_size=1, max_size=40)


def arrays(pairs):
    confidence, right = zip(*pairs, strict=True)
    return np.array(confidence), np.array(right)


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def area(right):
    """AURC of predictions in this order, by its definition."""
    return np.mean([1 - np.mean(right[: n + 1]) for n in range(len(right))])


def test_worked_by_hand():
    confidence, right = np.array([0.6, 0.9, 0.7, 0.8]), np.array([True, True, False, True])
    coverage, risk = selective.risk_coverage(confidence, right)
    assert coverage.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert risk == pytest.approx([0, 0, 1 / 3, 1 / 4])
    assert selective.aurc(confidence, right) == pytest.approx((1 / 3 + 1 / 4) / 4)


def test_equal_confidences_count_as_the_mean_of_their_orders():
    right = np.array([True, False, True, False])
    orders = [area(np.array(order)) for order in itertools.permutations(right)]
    assert selective.aurc(np.full(4, 0.5), right) == pytest.approx(np.mean(orders))


@settings(deadline=None)
@given(samples, st.randoms(use_true_random=False))
def test_the_order_of_the_samples_does_not_matter(pairs, random):
    shuffled = pairs[:]
    random.shuffle(shuffled)
    assert selective.aurc(*arrays(pairs)) == pytest.approx(selective.aurc(*arrays(shuffled)))


@settings(deadline=None)
@given(samples)
def test_the_best_order_is_best_and_any_increasing_score_is_the_same(pairs):
    confidence, right = arrays(pairs)
    best = selective.aurc(right.astype(float), right)
    assert best == pytest.approx(area(np.sort(right)[::-1]))
    assert selective.aurc(confidence, right) >= best - 1e-12
    assert selective.aurc(np.exp(5 * confidence), right) == selective.aurc(confidence, right)


@pytest.mark.parametrize(("right", "expected"), [(True, 0.0), (False, 1.0)])
def test_all_right_and_all_wrong(right, expected):
    confidence, hits = np.linspace(0, 1, 7), np.full(7, right)
    measures = selective.selective_measures(confidence, hits)
    assert measures["aurc"] == expected
    assert set(measures["curve"]["risk"]) == {expected}


# ------------------------------------------------------------------ normalised logits


def test_the_normalised_logit_by_its_definition():
    logits = np.random.default_rng(0).normal(size=(6, 5))
    centred = logits - logits.mean(-1, keepdims=True)
    for p in (1, 2, 7):
        expected = centred.max(-1) / np.linalg.norm(centred, ord=p, axis=-1)
        found = selective.normalised_logit(log_softmax(logits), p)
        np.testing.assert_allclose(found, expected)


def test_a_temperature_does_not_change_the_normalised_logit():
    log_p = np.log(drawn_images(20, 5)[0])
    one, other = (selective.normalised_logit(log_softmax(log_p / t), 3) for t in (0.3, 4.0))
    np.testing.assert_allclose(one, other)


def test_no_norm_is_chosen_where_none_ranks_better():
    log_p, labels = np.log(drawn_images(50, 4)[0]), np.ones(50, dtype=bool)
    assert selective.choose_norm(log_p, labels) is None


# ------------------------------------------------------------------ views


def test_the_diagram_has_15_bins_and_no_mean_where_one_is_empty():
    shown = view(np.array([0.35, 0.375, 0.4, 1.0]), np.array([True, False, True, False]))
    count, confidence, accuracy = (
        dict(enumerate(shown["reliability"][key])) for key in ("count", "confidence", "accuracy")
    )
    empty = dict.fromkeys(set(range(15)) - {5, 6, 14})
    assert count == {**dict.fromkeys(empty, 0), 5: 2, 6: 1, 14: 1}
    assert confidence == {**empty, 5: pytest.approx(0.3625), 6: pytest.approx(0.4), 14: 1.0}
    assert accuracy == {**empty, 5: 0.5, 6: 1.0, 14: 0.0}
    assert shown["ece"] == pytest.approx((2 * 0.1375 + 0.6 + 1.0) / 4)


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("confidence", [0.0, 0.4, 1.0])
def test_a_single_record(confidence, right):
    shown = view(np.array([confidence]), np.array([right]))
    assert shown["ece"] == abs(right - confidence)
    assert shown["underconfidence"] == right - confidence
    assert shown["confidence_on_errors"] == (None if right else confidence)
    assert shown["confidence_on_right"] == (confidence if right else None)
    assert shown["nll"] is None


# ------------------------------------------------------------------ intervals


def test_the_interval_is_near_the_binomial_one():
    low, high = underconfidence_interval(np.full(400, 0.8), np.arange(400) % 5 != 0)
    reach = 1.96 * np.sqrt(0.8 * 0.2 / 400)
    assert (low, high) == pytest.approx((-reach, reach), abs=0.01)


def test_the_interval_is_that_of_draws_with_replacement():
    """Against a loop that repeats the samples of each drawn unit; unit 2 has none."""
    confidence, right = np.array([0.9, 0.8, 0.6, 0.5]), np.array([True, False, True, True])
    units, random, values = np.array([0, 0, 1, 3]), np.random.default_rng(0), []
    for _ in range(30):
        rows = [i for unit in random.integers(0, 4, 4) for i in np.flatnonzero(units == unit)]
        values += [right[rows].mean() - confidence[rows].mean()] if rows else []
    expected = np.quantile(values, [0.025, 0.975])
    found = underconfidence_interval(confidence, right, units, draws=30)
    assert found == pytest.approx(expected)


def test_wilson_interval_is_the_published_one():
    # Newcombe (1998), Statistics in Medicine 17, table I, method 3.
    for successes, count, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605)):
        assert wilson(successes / count, count) == pytest.approx((low, high), abs=5e-5)
    assert wilson(0.0, 20) == pytest.approx((0, 0.1611), abs=5e-5)
    assert wilson(1.0, 29)[1] == 1
