"""Checks of parallel text: groups of sentences, scripts, swapped sides."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labo.lab.translation import guard
from tiny_corpus import PAIRS


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(20, 32)), max_size=40), st.integers(2, 6))
def test_groups_are_connected_components(pairs, n):
    source, target = (np.array([p[i] for p in pairs], dtype=np.uint64) for i in (0, 1))
    expected = list(range(len(pairs)))
    for _ in pairs:  # by brute force
        for i, one in enumerate(pairs):
            for j, other in enumerate(pairs):
                if one[0] == other[0] or one[1] == other[1]:
                    expected[i] = expected[j] = min(expected[i], expected[j])
    groups = guard.sentence_groups(source, target)
    assert groups.tolist() == expected
    held_out = guard.hold_out(groups, n)
    for group in set(expected):
        assert len({bool(h) for g, h in zip(expected, held_out, strict=True) if g == group}) == 1


@pytest.mark.parametrize(
    ("line", "language", "wrong"),
    [
        ("Добрый день", "ru", False),
        ("Добрый день", "de", True),
        ("Größe", "de", False),
        ("日本語です", "ja", False),
        ("한국어", "ko", False),
        ("hello", "ja", True),
        ("anything", "qq", False),
        ("GPT-4 и Python", "ru", True),
    ],
)
def test_scripts_of_languages(line, language, wrong):
    assert guard.wrong_script(line, language) == wrong


@pytest.mark.parametrize(
    ("source", "target", "count"),
    [
        ("de", "xx", 44),  # no table of words
        ("en_GB", "en_US", 44),
        ("de", "en", 19),  # too few sentences
    ],
)
def test_what_is_not_clearly_swapped_is_not_called_so(source, target, count):
    swapped = [(english, german) for german, english in PAIRS[:count]]
    assert not guard.look_swapped(swapped, source, target)
    mixed = swapped + PAIRS[:count]
    assert not guard.look_swapped(mixed, "de", "en")
