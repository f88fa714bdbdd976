"""95 % intervals: of a share, and of accuracy - mean confidence.

Tokens are drawn by the sentence, because the errors within a sentence are correlated.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from .reading import Booleans, Floats, Integers

DRAWS = 1000
LEVEL = 0.95


def wilson(share: float, count: float) -> tuple[float, float]:
    r"""Wilson's score interval of a share p of n independent trials.

    .. math:: \frac{p + z^2 / 2n \pm z \sqrt{p (1 - p) / n + z^2 / 4n^2}}{1 + z^2 / n}

    Unlike :math:`p \pm z \sqrt{p (1 - p) / n}` it stays within [0, 1] and has a width at p = 0 and
    p = 1 (Brown, Cai and DasGupta 2001).

    Args:
        share: p.
        count: n > 0; a mean over several runs need not be a whole number.

    Example:
        >>> [round(end, 3) for end in wilson(0.9, 10)]
        [0.596, 0.982]
    """
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    reach = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    reach /= 1 + z * z / count
    return max(centre - reach, 0.0), min(centre + reach, 1.0)


def underconfidence_interval(
    confidence: Floats,
    right: Booleans,
    units: Integers | None = None,
    *,
    draws: int = DRAWS,
    seed: int = 0,
) -> list[float]:
    """The percentile interval of accuracy - mean confidence, by the bootstrap.

    Args:
        confidence: (N,).
        right: (N,).
        units: (N,) which samples are drawn together, numbered from 0; each alone if not given.
        draws: the number of bootstrap draws.
        seed: of the draws.

    Returns:
        [low, high].

    Example:
        >>> underconfidence_interval(np.array([0.75, 0.75]), np.array([True, True]))
        [0.25, 0.25]
    """
    units = np.arange(len(right)) if units is None else units
    gaps, counts = np.bincount(units, right - confidence), np.bincount(units)
    size = len(counts)
    random = np.random.default_rng(seed)
    drawn = []
    for _ in range(draws):
        times = np.bincount(random.integers(0, size, size), minlength=size)
        samples = times @ counts
        if samples:  # none if only units without a sample were drawn
            drawn.append(times @ gaps / samples)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return [float(low), float(high)]
