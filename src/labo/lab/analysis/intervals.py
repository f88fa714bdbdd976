"""95 % intervals: of a share, and by the bootstrap of accuracy, underconfidence, ECE and AURC.

Tokens are drawn by the sentence, because the errors within a sentence are correlated.

The ECE is biased upwards: it is never below 0, so sampling noise increases it, and resampling
increases it again. The percentile interval then misses the true value; in simulations of a
perfectly calibrated model with 350 samples it never contained it. The interval of the ECE is
therefore the basic bootstrap interval, [2 e - upper, 2 e - lower], cut at 0.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from .calibration import BINS, bin_index, ece
from .reading import Booleans, Floats, Integers
from .selective import risk_by_rank

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


def bootstrap_intervals(
    confidence: Floats,
    right: Booleans,
    units: Integers | None = None,
    *,
    draws: int = DRAWS,
    seed: int = 0,
) -> dict[str, list[float]]:
    """Intervals of accuracy, underconfidence, ece and aurc.

    Args:
        confidence: (N,).
        right: (N,).
        units: (N,) which samples are drawn together, numbered from 0; each alone if not given.
        draws: the number of bootstrap draws.
        seed: of the draws.

    Returns:
        name -> [low, high].

    Example:
        >>> confidence = np.array([0.9, 0.8, 0.7, 0.6])
        >>> bootstrap_intervals(confidence, np.array([True, True, True, True]))["accuracy"]
        [1.0, 1.0]
    """
    order = np.argsort(-confidence, kind="stable")
    confidence, right = confidence[order], right[order]
    units = order if units is None else units[order]
    size = int(units.max()) + 1
    rank = np.unique(-confidence, return_inverse=True)[1]
    starts = np.flatnonzero(np.diff(rank, prepend=-1))
    index, gap = bin_index(confidence), confidence - right

    random = np.random.default_rng(seed)
    values: dict[str, list[float]] = {"accuracy": [], "underconfidence": [], "ece": [], "aurc": []}
    for _ in range(draws):
        times = np.bincount(random.integers(0, size, size), minlength=size)[units]
        total = times.sum()
        if total == 0:
            continue  # only units without a sample were drawn
        count = np.add.reduceat(times, starts)
        errors = np.add.reduceat(times * ~right, starts).astype(np.float64)
        values["accuracy"].append(1 - errors.sum() / total)
        values["underconfidence"].append(-(times @ gap) / total)
        values["ece"].append(np.abs(np.bincount(index, times * gap, BINS)).sum() / total)
        values["aurc"].append(risk_by_rank(count, errors).mean())

    tail = (1 - LEVEL) / 2
    result = {}
    for name, drawn in values.items():
        low, high = np.quantile(drawn, [tail, 1 - tail])
        if name == "ece":
            centre = ece(confidence, right)
            low, high = max(2 * centre - high, 0), max(2 * centre - low, 0)
        result[name] = [float(low), float(high)]
    return result
