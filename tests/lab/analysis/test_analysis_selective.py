"""Risk and coverage, normalised logits, and bootstrap intervals."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from analysis_runs import drawn_images
from labo.lab.analysis import selective
from labo.lab.analysis.calibration import ece, tempered
from labo.lab.analysis.intervals import bootstrap_intervals, wilson

levels = st.sampled_from([0.1, 0.3, 0.5, 0.9, 1.0])
samples = st.lists(st.tuples(levels, st.booleans()), min_size=1, max_size=40)


def arrays(pairs):
    confidence, right = zip(*pairs, strict=True)
    return np.array(confidence), np.array(right)


def area(right):
    """AURC of predictions in this order, by its definition."""
    return np.mean([1 - np.mean(right[: n + 1]) for n in range(len(right))])


def test_worked_by_hand():
    confidence, right = np.array([0.6, 0.9, 0.7, 0.8]), np.array([True, True, False, True])
    coverage, risk = selective.risk_coverage(confidence, right)
    assert coverage.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert risk == pytest.approx([0, 0, 1 / 3, 1 / 4])
    assert selective.aurc(confidence, right) == pytest.approx((1 / 3 + 1 / 4) / 4)
    assert selective.best_aurc(4, 1) == pytest.approx(1 / 16)
    assert selective.risk_at_coverage(confidence, right, 0.7) == pytest.approx(1 / 3)
    assert selective.coverage_at_risk(confidence, right, 0.0) == 0.5
    assert selective.coverage_at_risk(confidence, right, 0.26) == 1.0


def test_equal_confidences_count_as_the_mean_of_their_orders():
    right = np.array([True, False, True, False])
    orders = [area(np.array(order)) for order in itertools.permutations(right)]
    assert selective.aurc(np.full(4, 0.5), right) == pytest.approx(np.mean(orders))


def test_a_threshold_cannot_cut_through_equal_confidences():
    confidence, right = np.array([0.8, 0.8, 0.8, 0.2]), np.array([True, True, False, True])
    assert selective.coverage_at_risk(confidence, right, 0.1) == 0.0
    assert selective.coverage_at_risk(confidence, right, 0.34) == 1.0


@given(samples, st.randoms(use_true_random=False))
def test_the_order_of_the_samples_does_not_matter(pairs, random):
    shuffled = pairs[:]
    random.shuffle(shuffled)
    assert selective.aurc(*arrays(pairs)) == pytest.approx(selective.aurc(*arrays(shuffled)))


@given(samples)
def test_the_best_order_is_best_and_any_increasing_score_is_the_same(pairs):
    confidence, right = arrays(pairs)
    best = selective.best_aurc(len(right), int((~right).sum()))
    assert selective.aurc(right.astype(float), right) == pytest.approx(best)
    assert selective.excess_aurc(confidence, right) >= -1e-12
    assert selective.aurc(np.exp(5 * confidence), right) == selective.aurc(confidence, right)


@pytest.mark.parametrize(("right", "expected"), [(True, 0.0), (False, 1.0)])
def test_all_right_and_all_wrong(right, expected):
    confidence, hits = np.linspace(0, 1, 7), np.full(7, right)
    measures = selective.selective_measures(confidence, hits)
    assert measures["aurc"] == expected
    assert measures["excess_aurc"] == pytest.approx(0)
    assert set(measures["coverage_at_risk"].values()) == {1.0 if right else 0.0}
    assert set(measures["risk_at_coverage"].values()) == {expected}


def test_the_curve_is_thinned_and_keeps_its_ends():
    confidence = np.random.default_rng(0).random(5000)
    curve = selective.selective_measures(confidence, confidence > 0.3)["curve"]
    assert len(curve["coverage"]) == len(curve["risk"]) == 101
    assert curve["coverage"][0] == 1 / 5000
    assert curve["coverage"][-1] == 1


def test_a_better_ranking_has_a_smaller_area():
    random = np.random.default_rng(1)
    right = random.random(400) < 0.8
    scores = {noise: right + noise * random.normal(size=400) for noise in (0.3, 1.0, 3.0)}
    areas = [selective.aurc(score, right) for score in scores.values()]
    ranks = [roc_auc_score(right, score) for score in scores.values()]
    assert areas == sorted(areas)
    assert ranks == sorted(ranks, reverse=True)


# ------------------------------------------------------------------ normalised logits


def test_the_normalised_logit_by_its_definition():
    logits = np.random.default_rng(0).normal(size=(6, 5))
    centred = logits - logits.mean(-1, keepdims=True)
    for p in (1, 2, 7):
        expected = centred.max(-1) / np.linalg.norm(centred, ord=p, axis=-1)
        found = selective.normalised_logit(tempered(logits, 1.0), p)
        np.testing.assert_allclose(found, expected)


def test_a_temperature_does_not_change_the_normalised_logit():
    log_p = np.log(drawn_images(20, 5)[0])
    one, other = (selective.normalised_logit(tempered(log_p, t), 3) for t in (0.3, 4.0))
    np.testing.assert_allclose(one, other)


def test_equally_likely_classes_have_normalised_logit_0():
    assert selective.normalised_logit(np.log(np.full((1, 4), 0.25)), 2).tolist() == [0.0]


def test_no_norm_is_chosen_where_none_ranks_better():
    log_p, labels = np.log(drawn_images(50, 4)[0]), np.ones(50, dtype=bool)
    assert selective.choose_norm(log_p, labels) is None


def test_normalising_repairs_confidences_that_differ_in_scale():
    """The margin between the first two classes tells hits, but half of the logits are loud."""
    random = np.random.default_rng(0)
    margin, loud = random.random(600), random.random(600) < 0.5
    right = random.random(600) < 0.5 + 0.5 * margin
    logits = np.stack([1 + margin, 1 - margin, np.full(600, -2.0)], -1)
    log_p = tempered(logits * np.where(loud, 6, 0.7)[:, None], 1.0)
    p = selective.choose_norm(log_p, right)
    assert p is not None
    score = selective.normalised_logit(log_p, p)
    assert selective.aurc(score, right) < 0.9 * selective.aurc(log_p.max(-1), right)


# ------------------------------------------------------------------ intervals


def test_intervals_are_the_same_every_time_and_hold_the_value():
    p, labels = drawn_images(300, 4, sharpness=2.0)
    confidence, right = p.max(-1), p.argmax(-1) == labels
    found = bootstrap_intervals(confidence, right)
    assert found == bootstrap_intervals(confidence, right)
    for name, value in {
        "accuracy": right.mean(),
        "underconfidence": right.mean() - confidence.mean(),
        "ece": ece(confidence, right),
        "aurc": selective.aurc(confidence, right),
    }.items():
        low, high = found[name]
        assert low <= value <= high
        assert high - low < 0.2


def test_the_interval_of_the_accuracy_is_near_the_binomial_one():
    right = np.arange(400) % 5 != 0
    low, high = bootstrap_intervals(np.full(400, 0.8), right)["accuracy"]
    reach = 1.96 * np.sqrt(0.8 * 0.2 / 400)
    assert (low, high) == pytest.approx((0.8 - reach, 0.8 + reach), abs=0.01)


def test_the_order_of_the_samples_does_not_matter_to_a_unit():
    p, labels = drawn_images(40, 3)
    confidence, right, units = p.max(-1), p.argmax(-1) == labels, np.arange(40) // 4
    order = np.random.default_rng(0).permutation(40)
    one = bootstrap_intervals(confidence, right, units, draws=50)
    other = bootstrap_intervals(confidence[order], right[order], units[order], draws=50)
    for name, bounds in one.items():
        assert other[name] == pytest.approx(bounds)


def test_samples_that_go_wrong_together_widen_the_interval():
    right = np.repeat(np.arange(50) % 4 != 0, 20)
    confidence = np.full(1000, 0.75)
    alone = bootstrap_intervals(confidence, right)["accuracy"]
    together = bootstrap_intervals(confidence, right, np.repeat(np.arange(50), 20))["accuracy"]
    assert together[1] - together[0] > 3 * (alone[1] - alone[0])


def test_the_interval_of_the_ece_can_hold_the_truth_of_a_calibrated_model():
    """The true ECE is 0, the measured one near 0.05: an interval of the draws is above both."""
    held = 0
    for seed in range(40):
        random = np.random.default_rng(seed)
        confidence = random.beta(5, 1.2, 350)
        right = random.random(350) < confidence
        held += bootstrap_intervals(confidence, right, draws=200, seed=seed)["ece"][0] == 0
    assert held >= 12  # 22 are to be expected


@pytest.mark.parametrize("right", [True, False])
def test_a_single_record_has_an_interval_of_no_width(right):
    found = bootstrap_intervals(np.array([1.0]), np.array([right]))
    assert found["accuracy"] == [right, right]
    assert found["aurc"] == [1 - right, 1 - right]


def test_wilson_interval_is_the_published_one():
    # Newcombe (1998), Statistics in Medicine 17, table I, method 3.
    for successes, count, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605)):
        assert wilson(successes / count, count) == pytest.approx((low, high), abs=5e-5)
    assert wilson(0.0, 20) == pytest.approx((0, 0.1611), abs=5e-5)
    assert wilson(1.0, 29)[1] == 1
