"""Seeds and sentences: exact tests, Student's interval, sacrebleu's bootstrap."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sacrebleu.metrics import BLEU
from sacrebleu.significance import PairedTest
from scipy import stats

from labo.lab.analysis.significance import (
    mean_std,
    paired_bootstrap_bleu,
    paired_difference,
    sign_flip_test,
    t_cdf,
    t_interval,
    t_quantile,
)


def test_mean_and_standard_deviation():
    assert mean_std([1.0, 2.0, 6.0]) == (3.0, pytest.approx(np.sqrt(7)))
    assert mean_std([2.0]) == (2.0, None)


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


def test_the_exact_test_is_scipys():
    values = np.array([0.12, 0.31, -0.05, 0.2, 0.44, 0.02])
    theirs = stats.permutation_test(
        (values, np.zeros(6)), lambda x, y: np.mean(x - y), permutation_type="samples"
    )
    assert sign_flip_test(values)[0] == pytest.approx(theirs.pvalue)


def test_rounding_does_not_lose_the_smallest_p():
    values = [0.1 + 0.2, 0.3, 0.1, 0.7, 1e-9]
    assert sign_flip_test(values)[0] == 2 / 2**5


def test_many_seeds_are_drawn_and_agree_with_students_test():
    values = np.random.default_rng(0).normal(0.4, 1.0, 25)
    p, smallest = sign_flip_test(values)
    assert p == sign_flip_test(values)[0]
    assert p == pytest.approx(stats.ttest_1samp(values, 0).pvalue, abs=0.01)
    assert smallest == 2 / 2**25


def test_a_difference_over_seeds():
    found = paired_difference([0.75, 0.5, 1.0], [0.5, 0.5, 0.5])
    assert found["values"] == [0.25, 0.0, 0.5]
    assert found["mean"] == 0.25
    low, high = found["interval"]
    assert (low + high) / 2 == pytest.approx(0.25)
    assert found["p"] == 0.5  # a zero keeps its sum under either sign
    single = paired_difference([0.75], [0.5])
    assert single["mean"] == 0.25
    assert single["interval"] is single["p"] is single["smallest_p"] is None


# ------------------------------------------------------------------ sentences

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def corpus(wrong, seed=0, size=60):
    """References of eight words, and hypotheses in which a share of the words is wrong."""
    random = np.random.default_rng(seed)
    references = [random.choice(WORDS, 8).tolist() for _ in range(size)]
    hypotheses = [
        [word if random.random() > wrong else "zero" for word in line] for line in references
    ]
    return [" ".join(line) for line in hypotheses], [" ".join(line) for line in references]


def test_the_paired_bootstrap_is_sacrebleus():
    (ours, references), (theirs, _) = corpus(0.2), corpus(0.3)
    difference, p = paired_bootstrap_bleu(ours, theirs, references)
    test = PairedTest(
        [("b", theirs), ("a", ours)], {"BLEU": BLEU()}, [references], "bs", n_samples=1000
    )
    baseline, system = test()[1]["BLEU"]
    assert difference == pytest.approx(system.score - baseline.score)
    assert difference > 0
    assert p == system.p_value < 0.05
    assert paired_bootstrap_bleu(theirs, ours, references)[0] == -difference


def test_equal_output_is_no_significant_difference():
    hypotheses, references = corpus(0.3)
    assert paired_bootstrap_bleu(hypotheses, hypotheses, references) == (0.0, 1.0)


@settings(deadline=None, max_examples=5)
@given(st.integers(0, 1000))
def test_two_draws_of_one_model_seldom_differ(seed):
    _, references = corpus(0.2, seed)
    random = np.random.default_rng(seed + 1)
    ours, theirs = (
        [
            " ".join(word if random.random() > 0.2 else "zero" for word in line.split())
            for line in references
        ]
        for _ in range(2)
    )
    assert paired_bootstrap_bleu(ours, theirs, references)[1] > 0.001
