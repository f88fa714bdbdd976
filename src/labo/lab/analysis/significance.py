r"""Differences between two methods: an interval and two tests.

Over *seeds*: :func:`t_interval` and :func:`sign_flip_test` of the paired differences. They ask
whether training with another seed would give the same sign.

Over *examples*: :func:`paired_bootstrap` of the scores on redrawn examples. It asks whether other
test examples would give the same sign, for the models at hand.

``docs/compare.md`` says which of them the commands print, with references.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from .reading import Floats, Integers

EXACT_UP_TO = 16  # seeds: 65,536 combinations of signs
FLIPS = 100_000  # random combinations of signs for more seeds
DRAWS = 1000  # of the bootstrap over examples
DRAWS_SEED = 12345  # sacrebleu's, so that its p-values are reproduced


def mean_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard deviation (n - 1); the latter is None for a single value.

    Example:
        >>> mean_std([1.0, 3.0])
        (2.0, 1.4142135623730951)
    """
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return float(np.mean(values)), spread


# ------------------------------------------------------------------ over seeds


def t_cdf(t: float, freedom: int) -> float:
    r"""Student's distribution function, for a whole number of degrees of freedom.

    With :math:`\theta = \arctan(t / \sqrt\nu)` it is a finite sum (Abramowitz and Stegun 26.7.3 and
    26.7.4).

    Example:
        >>> round(t_cdf(2.776445, 4), 6)
        0.975
    """
    theta = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(theta), math.cos(theta)
    if freedom % 2:
        term, total = cosine, cosine if freedom > 1 else 0.0
        for k in range(2, freedom - 1, 2):
            term *= cosine**2 * k / (k + 1)
            total += term
        inside = 2 / math.pi * (theta + sine * total)
    else:
        term, total = 1.0, 1.0
        for k in range(1, freedom - 2, 2):
            term *= cosine**2 * k / (k + 1)
            total += term
        inside = sine * total
    return (1 + inside) / 2


def t_quantile(p: float, freedom: int) -> float:
    """The inverse of :func:`t_cdf`, for p in [0.5, 1).

    Example:
        >>> round(t_quantile(0.975, 4), 4)
        2.7764
    """
    low, high = 0.0, 1.0
    while t_cdf(high, freedom) < p:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, freedom) < p else (low, middle)
    return (low + high) / 2


def t_interval(differences: Sequence[float]) -> tuple[float, float] | None:
    r"""Student's 95 % interval of the mean, :math:`\bar d \pm t_{n-1}\, s / \sqrt n`: low, high.

    None if there is a single difference or all are equal: no deviation can be estimated.

    Example:
        >>> [round(bound, 3) for bound in t_interval([0.2, 0.4, 0.6])]
        [-0.097, 0.897]
    """
    mean, std = mean_std(differences)
    if std is None or std <= 1e-12 * np.abs(differences).max(initial=0):
        return None
    n = len(differences)
    reach = t_quantile(0.975, n - 1) * std / math.sqrt(n)
    return mean - reach, mean + reach


def wilson(share: float, count: float) -> tuple[float, float]:
    r"""Wilson's 95 % interval of a share p of n independent trials; n may be a mean over runs.

    .. math:: \frac{p + z^2 / 2n \pm z \sqrt{p (1 - p) / n + z^2 / 4n^2}}{1 + z^2 / n}

    Unlike :math:`p \pm z \sqrt{p (1 - p) / n}` it stays within [0, 1] and has a width at p = 0 and
    p = 1 (Brown, Cai and DasGupta 2001).

    Example:
        >>> [round(end, 3) for end in wilson(0.9, 10)]
        [0.596, 0.982]
    """
    z = NormalDist().inv_cdf(0.975)
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    reach = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    reach /= 1 + z * z / count
    return max(centre - reach, 0.0), min(centre + reach, 1.0)


def sign_flip_test(differences: Sequence[float]) -> tuple[float, float]:
    """Exact paired permutation test over seeds: the two-sided p-value, and the smallest possible.

    If two methods are equally good, the difference of a pair is as likely to be d as -d. The
    p-value is the share of all 2^n combinations of signs whose mean is at least as far from 0. For
    more than 16 pairs 100,000 combinations are drawn at random. The smallest p-value that n pairs
    can give is 2 / 2^n. With five seeds that is 0.0625: no difference over five seeds is
    significant at 5 % by this test.

    Example:
        >>> sign_flip_test([0.3, 0.1, 0.2, 0.4, 0.2, 0.1])
        (0.03125, 0.03125)
    """
    values = np.asarray(differences, dtype=np.float64)
    n = len(values)
    exact = n <= EXACT_UP_TO
    if exact:
        signs = 1 - 2.0 * (np.arange(2**n)[:, None] >> np.arange(n) & 1)
    else:
        signs = np.random.default_rng(0).choice([-1.0, 1.0], (FLIPS, n))
    slack = 1e-12 * np.abs(values).sum()  # rounding of sums in different orders
    as_far = np.abs(signs @ values) >= abs(values.sum()) - slack
    p = as_far.mean() if exact else (as_far.sum() + 1) / (FLIPS + 1)
    return float(p), 2.0 / 2**n


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """The mean difference of two methods over the same seeds, with its interval and its test.

    For a single seed there is neither interval nor test.

    Example:
        >>> found = paired_difference([0.5, 0.75], [0.25, 0.25])
        >>> found["mean"], found["p"], found["smallest_p"]
        (0.375, 0.5, 0.5)
    """
    values = [a - b for a, b in zip(ours, theirs, strict=True)]
    p, smallest = sign_flip_test(values) if len(values) > 1 else (None, None)
    return {
        "values": values,
        "mean": float(np.mean(values)),
        "interval": t_interval(values),
        "p": p,
        "smallest_p": smallest,
    }


# ------------------------------------------------------------------ over examples


def example_draws(size: int) -> Integers:
    """(``DRAWS``, size) how often each example is in each bootstrap draw.

    The draws depend on the number of examples alone, so the scores of any two runs on the same
    examples are paired.

    Example:
        >>> example_draws(5).shape, set(example_draws(5).sum(1).tolist())
        ((1000, 5), {5})
    """
    chosen = np.random.default_rng(DRAWS_SEED).choice(size, size=(DRAWS, size), replace=True)
    shifted = chosen + size * np.arange(DRAWS)[:, None]
    return np.bincount(shifted.ravel(), minlength=DRAWS * size).reshape(DRAWS, size)


def paired_bootstrap(ours: Sequence[Floats], theirs: Sequence[Floats]) -> float:
    r"""The p-value of the paired bootstrap over examples, of the mean difference over seeds.

    With :math:`d_0` the mean over seeds of the score differences on all examples and :math:`d_b`
    the same on draw b, the p-value is the share of draws with :math:`|d_b| - \overline{|d|} >
    |d_0|`, counted as (c + 1) / (B + 1). For one seed it is the p-value of sacrebleu.

    For each seed the scores of both methods are (1 + B,): on all examples, then on each draw.

    Example:
        >>> scores = np.array([30.0, 29.0, 31.0])
        >>> paired_bootstrap([scores], [scores])
        1.0
    """
    differences = np.mean([a - b for a, b in zip(ours, theirs, strict=True)], axis=0)
    if differences[0] == 0:
        return 1.0  # equal scores; the count below would give 1 / (B + 1) for equal outputs
    drawn = np.abs(differences[1:])
    beyond = int((drawn - drawn.mean() > abs(differences[0])).sum())
    return (beyond + 1) / (len(drawn) + 1)
