"""Frequency parts, the bootstrap, chosen probabilities, output lengths and token alignment."""

from __future__ import annotations

import numpy as np
import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st
from sacrebleu.metrics import BLEU
from sacrebleu.significance import PairedTest

from labo.lab.analysis.significance import example_draws, paired_bootstrap
from labo.lab.errors import RequestError
from labo.lab.translation.analysis import matched_tokens
from labo.lab.translation.bleu import bootstrap_bleu
from labo.lab.translation.frequency import (
    bleu_by_part,
    chosen_probabilities,
    frequency_parts,
    histogram,
)

REFERENCES = [
    "the cat sat on the mat",
    "a dog ran over the hill",
    "birds sing in the early morning",
    "nobody knows what the future brings",
    "rain falls on the quiet town",
]
HYPOTHESES = [
    "the cat sat on the mat",
    "a dog ran on the hill",
    "birds sing in the late morning",
    "nobody knows the future",
    "snow falls on the town",
]


@pytest.mark.parametrize(
    ("sentences", "size", "expected"),
    [
        (7283, 2400, (2400, 2400, 2400)),  # the paper's validation set: 83 are left over
        (6750, 2400, (2400, 2400, 1950)),  # its test set
        (7283, None, (2428, 2428, 2427)),
        (2, None, (1, 1, 0)),
        (1, 4, (1, 0, 0)),
    ],
)
def test_the_sizes_of_the_parts(sentences, size, expected):
    scores = np.random.default_rng(0).random(sentences)
    parts = frequency_parts(scores, size)
    assert tuple(len(index) for index in parts.values()) == expected
    assert len(set(np.concatenate(list(parts.values())).tolist())) == sum(expected)


def test_bleu_by_part_is_that_of_sacrebleu():
    parts = {"one": np.array([3, 1]), "none": np.array([], dtype=int), "all": np.arange(5)}
    found = bleu_by_part(HYPOTHESES, REFERENCES, parts)
    chosen = sacrebleu.corpus_bleu([HYPOTHESES[3], HYPOTHESES[1]], [[REFERENCES[3], REFERENCES[1]]])
    assert found["one"] == pytest.approx(chosen.score)
    assert found["all"] == pytest.approx(sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score)
    assert found["none"] is None


def test_bleu_is_cased_as_the_run_was_scored():
    shouted, parts = [text.upper() for text in HYPOTHESES], {"all": np.arange(5)}
    lower = bleu_by_part(shouted, REFERENCES, parts, "nrefs:1|case:lc|eff:no|tok:13a|smooth:exp")
    assert lower == bleu_by_part(HYPOTHESES, REFERENCES, parts)
    assert bleu_by_part(shouted, REFERENCES, parts, "nrefs:1|case:mixed|tok:13a")["all"] < 1


# ------------------------------------------------------------------ the bootstrap over sentences

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def corpus(wrong, seed=0, size=60):
    """References of eight words, and hypotheses in which a share of the words is wrong."""
    random = np.random.default_rng(seed)
    references = [random.choice(WORDS, 8).tolist() for _ in range(size)]
    hypotheses = [
        [word if random.random() > wrong else "zero" for word in line] for line in references
    ]
    return [" ".join(line) for line in hypotheses], [" ".join(line) for line in references]


def bootstrap(ours, theirs, references):
    """The difference and the p-value of two systems."""
    drawn = [bootstrap_bleu(hypotheses, references) for hypotheses in (ours, theirs)]
    return drawn[0][0] - drawn[1][0], paired_bootstrap(drawn[:1], drawn[1:])


@pytest.mark.parametrize("size", [5, 60, 300])
def test_the_paired_bootstrap_is_sacrebleus(size):
    (ours, references), (theirs, _) = corpus(0.2, size=size), corpus(0.3, size=size)
    difference, p = bootstrap(ours, theirs, references)
    test = PairedTest(
        [("b", theirs), ("a", ours)], {"BLEU": BLEU()}, [references], "bs", n_samples=1000
    )
    baseline, system = test()[1]["BLEU"]
    assert difference == pytest.approx(system.score - baseline.score)
    assert p == system.p_value
    assert (difference > 0) & (p < 0.05) or size == 5
    assert bootstrap(theirs, ours, references)[0] == -difference


def test_a_draw_is_scored_as_a_corpus():
    hypotheses, references = corpus(0.3, size=20)
    drawn = bootstrap_bleu(hypotheses, references)
    for number, times in enumerate(example_draws(20)[:3], 1):
        index = np.repeat(np.arange(20), times)
        chosen = [[lines[i] for i in index] for lines in (hypotheses, references)]
        expected = sacrebleu.corpus_bleu(chosen[0], [chosen[1]]).score
        assert drawn[number] == pytest.approx(expected)


def test_equal_output_is_no_significant_difference():
    hypotheses, references = corpus(0.3)
    assert bootstrap(hypotheses, hypotheses, references) == (0.0, 1.0)


def test_a_signature_of_an_unknown_tokenizer_is_one_clear_line():
    with pytest.raises(RequestError, match="sacrebleu has no tokenizer 'mine'"):
        bootstrap_bleu(["a"], ["a"], "nrefs:1|case:lc|tok:mine")


# ------------------------------------------------------------------ chosen probabilities


def test_a_probability_on_an_edge_is_in_the_bin_above():
    """Rounding must not move it: 0.57 * 100 is below 57."""
    shares = [histogram(np.array([b / 100]), bins=100) for b in range(100)]
    assert [np.argmax(share) for share in shares] == list(range(100))


def test_histograms_of_all_sentences_and_of_parts():
    probabilities = [np.array([0.9, 0.92]), np.array([0.42]), np.empty(0)]
    parts = {"most": np.array([0]), "medium": np.array([1]), "least": np.array([2])}
    found = chosen_probabilities(probabilities, parts)
    assert found["peak"] == {"all": 0.925, "most": 0.925, "medium": 0.425, "least": None}
    assert sum(found["shares"]["all"]) == pytest.approx(1)


# ------------------------------------------------------------------ alignment


def distance(a, b):
    """Edit distance by the recursion that defines it."""
    if not a or not b:
        return len(a) + len(b)
    substituted = distance(a[1:], b[1:]) + (a[0] != b[0])
    return min(substituted, distance(a[1:], b) + 1, distance(a, b[1:]) + 1)


def most_matches(a, b, edits):
    """The most matches of an alignment with this many edits, or None if there is none."""
    if edits < 0:
        return None
    if not a or not b:
        return 0 if len(a) + len(b) <= edits else None
    equal = a[0] == b[0]
    options = [
        (most_matches(a[1:], b[1:], edits - (not equal)), equal),
        (most_matches(a[1:], b, edits - 1), 0),
        (most_matches(a, b[1:], edits - 1), 0),
    ]
    return max((found + here for found, here in options if found is not None), default=None)


@pytest.mark.parametrize(
    ("hypothesis", "reference", "expected"),
    [
        ("a b c", "a b c", "111"),
        ("a b b c", "a b c", "1011"),
        ("b a", "a b", "10"),  # one kept by deletion and insertion, not two substitutions
        ("", "a b", ""),
        ("a b", "", "00"),
    ],
)
def test_matches_worked_by_hand(hypothesis, reference, expected):
    found = matched_tokens(hypothesis.split(), reference.split())
    assert "".join(str(int(match)) for match in found) == expected


token_lists = st.lists(st.sampled_from("abc"), max_size=5)


@given(token_lists, token_lists)
def test_an_alignment_has_least_edits_and_then_most_matches(hypothesis, reference):
    matched = matched_tokens(hypothesis, reference)
    assert len(matched) == len(hypothesis)
    expected = most_matches(hypothesis, reference, distance(hypothesis, reference))
    assert matched.sum() == expected
    # What is matched is a common subsequence.
    rest = iter(reference)
    assert all(token in rest for token, hit in zip(hypothesis, matched, strict=True) if hit)
