"""Documents cut and packed: every pair of tokens once, no block too long, hardly any room lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labo.lab.language_modeling.packing import best_fit, pack

lengths = st.lists(st.integers(0, 70), min_size=1, max_size=80).map(np.array)
blocks = st.integers(1, 33)


@given(lengths, blocks, st.booleans())
def test_each_pair_is_in_one_piece(lengths, block, share):
    packing = pack(lengths, block, 0, whole=False, share=share)
    found = [
        (int(d), int(f) + i)
        for d, f, n in zip(packing.document, packing.first, packing.length, strict=True)
        for i in range(n)
    ]
    assert sorted(found) == [(d, i) for d, n in enumerate(lengths) for i in range(n - 1)]
    assert packing.length.min(initial=1) >= 1
    pieces = [packing.pieces(number) for number in range(len(packing))]
    sizes = [sum(piece.length for piece in of_block) for of_block in pieces]
    assert packing.block_lengths().tolist() == sizes
    assert all(0 < size <= block for size in sizes)


@given(lengths, blocks)
def test_whole_documents_are_cut_nowhere(lengths, block):
    packing = pack(lengths, block, 0, whole=True, share=True)
    used = [d for d, n in enumerate(lengths) if 2 <= n <= block + 1]
    assert sorted(packing.document.tolist()) == used
    assert not packing.first.any()


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60).map(np.array))
def test_two_blocks_could_not_have_been_one(lengths):
    """What best fit promises: any two blocks together are longer than one."""
    order, starts = best_fit(lengths, 20, seed=0)
    sizes = sorted(np.add.reduceat(lengths[order], starts[:-1]))
    assert len(sizes) < 2 or sizes[0] + sizes[1] > 20


def test_little_room_is_lost_on_real_lengths():
    draws = np.random.default_rng(0).lognormal(5, 1, 5000).astype(int) + 2
    packing = pack(draws, 512, 0, whole=False, share=True)
    assert packing.length.sum() / (len(packing) * 512) > 0.999


def test_the_seed_decides_what_is_together():
    draws = np.random.default_rng(0).integers(2, 50, 300)
    one, same, other = (pack(draws, 64, seed, whole=False, share=True) for seed in (0, 0, 1))
    assert one.document.tolist() == same.document.tolist()
    assert one.document.tolist() != other.document.tolist()


@pytest.mark.parametrize("share", [True, False])
def test_nothing_to_pack(share):
    packing = pack(np.array([1, 0]), 8, 0, whole=False, share=share)
    assert len(packing) == 0
