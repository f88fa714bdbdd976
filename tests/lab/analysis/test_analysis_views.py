"""What is measured of a list of predictions. The measures themselves: tests/core/calibration.

Oracles are loops in float64.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labo.lab.analysis.views import view

# Few different confidences, so that many are equal; edges of bins; and any.
some = st.sampled_from([0.1, 0.4, 0.7, 1.0]) | st.floats(0, 1, allow_subnormal=False)
samples = st.lists(st.tuples(some, st.booleans()), min_size=1, max_size=60)


def arrays(pairs):
    confidence, right = zip(*pairs, strict=True)
    return np.array(confidence), np.array(right)


@settings(deadline=None)
@given(samples)
def test_ece_and_diagram_against_a_loop_over_bins(pairs):
    shown = view(*arrays(pairs))
    diagram, expected = shown["reliability"], 0.0
    for b in range(15):
        inside = [(c, r) for c, r in pairs if b / 15 <= c < (b + 1) / 15 or (b == 14 and c == 1)]
        assert diagram["count"][b] == len(inside)
        if inside:
            confidence, accuracy = np.mean(inside, axis=0)
            assert diagram["confidence"][b] == pytest.approx(confidence)
            assert diagram["accuracy"][b] == pytest.approx(accuracy)
            expected += len(inside) / len(pairs) * abs(confidence - accuracy)
        else:
            assert diagram["confidence"][b] is diagram["accuracy"][b] is None
    assert shown["ece"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("confidence", [0.0, 0.4, 1.0])
def test_a_single_record(confidence, right):
    shown = view(np.array([confidence]), np.array([right]))
    assert shown["ece"] == abs(right - confidence)
    assert shown["underconfidence"] == right - confidence
    assert shown["confidence_on_errors"] == (None if right else confidence)
    assert shown["confidence_on_right"] == (confidence if right else None)
    assert shown["nll"] is None
