"""Sequences of like length in batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from labo.lab.text.batching import grouped, longest_first


@given(st.lists(st.integers(1, 60), max_size=50), st.integers(1, 500), st.booleans())
def test_batches_hold_every_sequence_once_within_the_limit(lengths, limit, ascending):
    order = longest_first(lengths)
    found = list(grouped(order[::-1] if ascending else order, lengths, limit))
    assert sorted(i for batch in found for i in batch) == list(range(len(lengths)))
    for batch in found:
        assert len(batch) * max(lengths[i] for i in batch) <= limit or len(batch) == 1
