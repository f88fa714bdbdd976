"""The length of the output relative to the reference, by beam size.

A wider beam finds more probable outputs. With label smoothing these are shorter (Liang et al.
2022), which a comparison at one beam size does not show.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..analysis.reading import Integers


def length_bias(lengths: Mapping[str, Integers], reference: Integers) -> dict[str, Any]:
    """The length ratio for every beam size.

    Args:
        lengths: beam size -> (N,) output lengths in tokens.
        reference: (N,) lengths of the references.

    Returns:
        beams: for each size the ratio of the sums, None if the references are empty.

    Example:
        >>> length_bias({"1": np.array([4, 8]), "20": np.array([4, 5])}, np.array([4, 8]))
        {'beams': {'1': {'ratio': 1.0}, '20': {'ratio': 0.75}}}
    """
    total = int(reference.sum())
    ratios = {
        beam: float(lengths[beam].sum() / total) if total else None
        for beam in sorted(lengths, key=int)
    }
    return {"beams": {beam: {"ratio": ratio} for beam, ratio in ratios.items()}}
