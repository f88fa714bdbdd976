"""Is a difference more than chance? Over seeds, and over the sentences of one test set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..translation.frequency import bleu_metric

EXACT_UP_TO = 16  # seeds: 65,536 ways to flip their signs
FLIPS = 100_000  # drawn at random beyond that


def mean_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard deviation (n - 1); None for the latter of a single value.

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

    Args:
        t: where.
        freedom: degrees of freedom, from 1.

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


def t_interval(differences: Sequence[float], level: float = 0.95) -> list[float] | None:
    r"""Student's interval of the mean, :math:`\bar d \pm t_{n-1}\, s / \sqrt n`.

    Args:
        differences: one per seed.
        level: its confidence.

    Returns:
        [low, high], or None if the differences have no spread to learn from: a single one, or
        all the same.

    Example:
        >>> [round(bound, 3) for bound in t_interval([0.2, 0.4, 0.6])]
        [-0.097, 0.897]
    """
    mean, std = mean_std(differences)
    if std is None or std <= 1e-12 * np.abs(differences).max(initial=0):
        return None
    n = len(differences)
    reach = t_quantile((1 + level) / 2, n - 1) * std / math.sqrt(n)
    return [mean - reach, mean + reach]


def sign_flip_test(differences: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Exact paired test over seeds: how often is the mean as far from 0 with random signs?

    If two methods are equally good, the difference of a pair is as likely to be d as -d. The
    p-value is the share of all 2^n choices of signs whose mean is at least as far from 0. Above 16
    pairs the signs are drawn at random, 100,000 times.

    Args:
        differences: one per pair.
        seed: of the draws.

    Returns:
        p, two-sided, and the smallest p that n pairs can give, 2 / 2^n: with five seeds 0.0625, so
        that no difference over five seeds is "significant at 5 %" by this test.

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
        signs = np.random.default_rng(seed).choice([-1.0, 1.0], (FLIPS, n))
    slack = 1e-12 * np.abs(values).sum()  # sums of the same numbers in another order
    as_far = np.abs(signs @ values) >= abs(values.sum()) - slack
    p = as_far.mean() if exact else (as_far.sum() + 1) / (FLIPS + 1)
    return float(p), 2.0 / 2**n


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """The mean difference of two methods over the same seeds, its interval and its test.

    Args:
        ours: a score per seed.
        theirs: of the other method, for the same seeds.

    Returns:
        values, mean, interval (of :func:`t_interval`), p and smallest_p (of
        :func:`sign_flip_test`); the last three None for a single seed.

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


# ------------------------------------------------------------------ over sentences


def paired_bootstrap_bleu(
    ours: Sequence[str],
    theirs: Sequence[str],
    references: Sequence[str],
    signature: str | None = None,
) -> tuple[float, float]:
    """sacrebleu's paired bootstrap: 1000 draws of sentences, its own seed.

    Args:
        ours: hypotheses of one run.
        theirs: of the other.
        references: of both.
        signature: as for :func:`labo.lab.analysis.frequency.bleu_metric`.

    Returns:
        BLEU of ours less that of theirs, and the p-value.

    Example:
        >>> text = ["one two three four five", "six seven eight nine ten"]
        >>> paired_bootstrap_bleu(text, text, text)
        (0.0, 1.0)
    """
    from sacrebleu.significance import PairedTest

    systems: list[tuple[str, Sequence[str]]] = [("theirs", theirs), ("ours", ours)]
    metrics = {"BLEU": bleu_metric(signature)}
    scores: dict[str, list[Any]] = PairedTest(systems, metrics, [references], test_type="bs")()[1]
    baseline, system = scores["BLEU"]
    difference = float(system.score - baseline.score)
    # For two equal outputs sacrebleu counts draws with 0 > 0, and would say p = 0.001.
    return difference, float(system.p_value) if difference else 1.0
