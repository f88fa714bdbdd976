"""Curves over training from ``metrics.jsonl``: loss, scores, entropy, confidence, alpha."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

POINTS = 500  # at most, of a curve


def training_curves(metrics: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The logged steps and the evaluations as columns.

    Args:
        metrics: the lines of ``metrics.jsonl``.

    Returns:
        loss: step, epoch, loss and lr, at most ``POINTS`` of each, evenly spaced; valid: step,
        epoch and every metric, None where a line lacks it.

    Example:
        >>> lines = [{"step": 1, "epoch": 1, "loss": 2.0, "lr": 0.1},
        ...          {"step": 1, "epoch": 1, "valid": {"nll": 1.5}}]
        >>> training_curves(lines)["valid"]
        {'step': [1], 'epoch': [1], 'nll': [1.5]}
    """
    metrics = list(metrics)
    steps = [line for line in metrics if "loss" in line]
    if len(steps) > POINTS:
        steps = [steps[i] for i in np.linspace(0, len(steps) - 1, POINTS).round().astype(int)]
    evaluations = [line for line in metrics if line.get("valid")]
    names = dict.fromkeys(name for line in evaluations for name in line["valid"])
    return {
        "loss": {key: [line.get(key) for line in steps] for key in ("step", "epoch", "loss", "lr")},
        "valid": {
            **{key: [line.get(key) for line in evaluations] for key in ("step", "epoch")},
            **{name: [line["valid"].get(name) for line in evaluations] for name in names},
        },
    }


def mean_alpha(
    entropy: Sequence[float | None], num_classes: int, rho: float = 0.5
) -> list[float | None]:
    r"""The mean adaptive alpha of an evaluation, from its mean entropy.

    .. math:: \bar\alpha = 1 - \rho \bar H / \log K

    alpha is linear in H, so this is exact.

    Args:
        entropy: mean entropy of each evaluation, in nats.
        num_classes: K.
        rho: the hyper-parameter of LABO.

    Example:
        >>> mean_alpha([math.log(10), 0.0, None], num_classes=10)
        [0.5, 1.0, None]
    """
    largest = math.log(num_classes) if num_classes > 1 else 1.0
    return [None if h is None else 1 - rho * h / largest for h in entropy]


def alpha_curve(
    entropy: Sequence[float | None], num_classes: int, method: Mapping[str, Any]
) -> dict[str, Any]:
    """LABO's alpha over training: the one a run used, or that LABO would have used.

    Args:
        entropy: mean entropy of each evaluation.
        num_classes: K.
        method: a recipe's method, with its name.

    Example:
        >>> alpha_curve([0.0], 10, {"name": "labo", "alpha": 0.3})
        {'rho': None, 'used': True, 'values': [0.3]}
        >>> alpha_curve([0.0], 10, {"name": "ls", "alpha": 0.1})
        {'rho': 0.5, 'used': False, 'values': [1.0]}
    """
    used = method["name"] == "labo"
    if used and not isinstance(method.get("alpha", "adaptive"), str):
        return {"rho": None, "used": True, "values": [method["alpha"]] * len(entropy)}
    rho = method.get("rho", 0.5) if used else 0.5
    return {"rho": rho, "used": used, "values": mean_alpha(entropy, num_classes, rho)}
