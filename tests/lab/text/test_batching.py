"""Sequences of like length in batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from labo.lab.text.batching import in_batches


@given(st.lists(st.integers(1, 60), max_size=50), st.integers(1, 500), st.booleans())
def test_every_sequence_is_in_one_batch_within_the_limit(lengths, limit, longest_first):
    batches, sizes = [], []

    def names(batch):
        batches.append(batch)
        return map(str, batch)

    options = {"longest_first": longest_first, "advance": sizes.append}
    found = in_batches(names, lengths, limit, **options)
    assert found == [str(index) for index in range(len(lengths))]
    assert sizes == [len(batch) for batch in batches]
    for batch in batches:
        assert len(batch) * max(lengths[i] for i in batch) <= limit or len(batch) == 1
    order = [lengths[i] for batch in batches for i in batch]
    assert order == sorted(lengths, reverse=longest_first)
