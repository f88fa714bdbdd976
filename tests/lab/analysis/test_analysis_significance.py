"""Tests over seeds and over examples: exact tests, Student's interval, the bootstrap."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from labo.lab.analysis.significance import (
    example_draws,
    paired_bootstrap,
    sign_flip_test,
    t_cdf,
    t_interval,
    t_quantile,
)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 8, 9, 30])
def test_students_distribution_against_scipy(freedom):
    for t in (-3.0, 0.0, 0.4, 1.7, 12.0):
        assert t_cdf(t, freedom) == pytest.approx(stats.t.cdf(t, freedom), abs=1e-12)
    for p in (0.5, 0.9, 0.975, 0.999):
        assert t_quantile(p, freedom) == pytest.approx(stats.t.ppf(p, freedom), rel=1e-9, abs=1e-12)


def test_students_interval_against_scipy():
    values = [0.3, -0.1, 0.4, 0.2]
    theirs = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert t_interval(values) == pytest.approx(theirs)


@pytest.mark.parametrize("values", [[0.5], [0.1, 0.1, 0.1], [0.0, 0.0]])
def test_without_spread_there_is_no_interval(values):
    assert t_interval(values) is None


def test_signs_flipped_by_hand():
    # means of 1, 2, 3 with all signs: |sum| is 6, 6, 4, 4, 2, 2, 0, 0
    assert sign_flip_test([1.0, 2.0, 3.0]) == (0.25, 0.25)
    assert sign_flip_test([1.0, -2.0, 3.0]) == (0.75, 0.25)
    assert sign_flip_test([0.0, 0.0]) == (1.0, 0.5)
    assert sign_flip_test([0.7]) == (1.0, 1.0)


@settings(deadline=None)
@given(st.lists(st.integers(-4, 4), min_size=1, max_size=8))
def test_signs_flipped_one_by_one(values):
    signed = [
        abs(sum(s * v for s, v in zip(signs, values, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(values))
    ]
    expected = np.mean([one >= abs(sum(values)) for one in signed])
    p, smallest = sign_flip_test(values)
    assert p == pytest.approx(expected)
    assert smallest <= p <= 1
    assert sign_flip_test([-v for v in values])[0] == p


def test_rounding_does_not_lose_the_smallest_p():
    values = [0.1 + 0.2, 0.3, 0.1, 0.7, 1e-9]
    assert sign_flip_test(values)[0] == 2 / 2**5


def test_many_seeds_are_drawn_and_agree_with_students_test():
    values = np.random.default_rng(0).normal(0.4, 1.0, 25)
    p, smallest = sign_flip_test(values)
    assert p == sign_flip_test(values)[0]
    assert p == pytest.approx(stats.ttest_1samp(values, 0).pvalue, abs=0.01)
    assert smallest == 2 / 2**25


# ------------------------------------------------------------------ examples


def scores(right):
    """The accuracy on all examples and on each draw."""
    right = np.asarray(right, dtype=float)
    return np.array([right.mean(), *(example_draws(len(right)) @ right / len(right))])


def test_the_bootstrap_tells_a_large_difference_from_none():
    random = np.random.default_rng(0)
    good, bad = random.random(200) < 0.9, random.random(200) < 0.6
    assert paired_bootstrap([scores(good)], [scores(bad)]) == 1 / 1001
    same = random.permutation(good)
    assert paired_bootstrap([scores(good)], [scores(same)]) > 0.05


def test_the_bootstrap_over_several_seeds_is_that_of_their_mean_difference():
    random = np.random.default_rng(1)
    ours = [scores(random.random(100) < 0.75) for _ in range(3)]
    theirs = [scores(random.random(100) < 0.7) for _ in range(3)]
    mean = np.mean(ours, axis=0) - np.mean(theirs, axis=0)
    drawn = np.abs(mean[1:])
    expected = (np.sum(drawn - drawn.mean() > abs(mean[0])) + 1) / 1001
    assert paired_bootstrap(ours, theirs) == expected
    # A seed counted twice is no further evidence; opposite differences cancel.
    once, twice = (paired_bootstrap(ours[:1] * n, theirs[:1] * n) for n in (1, 2))
    assert once == twice
    assert paired_bootstrap([ours[0], theirs[0]], [theirs[0], ours[0]]) == 1.0


def test_the_exact_test_is_scipys():
    values = np.array([0.12, 0.31, -0.05, 0.2, 0.44, 0.02])
    theirs = stats.permutation_test(
        (values, np.zeros(6)), lambda x, y: np.mean(x - y), permutation_type="samples"
    )
    assert sign_flip_test(values)[0] == pytest.approx(theirs.pvalue)
