"""The length of the output relative to the reference, by beam size.

A wider beam finds more probable outputs. With label smoothing these are shorter (Liang et al.
2022), which a comparison at one beam size does not show.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..analysis.reading import Integers


def length_bias(lengths: Mapping[str, Integers], reference: Integers) -> dict[str, Any]:
    """Mean length, length ratio and share of short outputs for every beam size.

    Args:
        lengths: beam size -> (N,) output lengths in tokens.
        reference: (N,) lengths of the references.

    Returns:
        reference: the mean length of the references; beams: for each size the mean length, the
        ratio of the sums (None if the references are empty) and the share of outputs that are
        shorter than their reference.

    Example:
        >>> bias = length_bias({"1": np.array([4, 8]), "20": np.array([4, 5])}, np.array([4, 8]))
        >>> bias["beams"]["20"]
        {'mean': 4.5, 'ratio': 0.75, 'shorter': 0.5}
    """
    total = int(reference.sum())
    beams = {
        beam: {
            "mean": float(lengths[beam].mean()),
            "ratio": float(lengths[beam].sum() / total) if total else None,
            "shorter": float((lengths[beam] < reference).mean()),
        }
        for beam in sorted(lengths, key=int)
    }
    return {"reference": float(np.mean(reference)), "beams": beams}
