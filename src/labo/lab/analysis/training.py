"""Curves over training from ``metrics.jsonl``: loss, scores, entropy, confidence, alpha."""

from __future__ import annotations

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


def alpha_curve(
    entropy: Sequence[float | None], num_classes: int, method: Mapping[str, Any]
) -> dict[str, Any]:
    """LABO's mean alpha over training: the one a run used, or that LABO would have used.

    alpha is linear in the entropy, so its mean follows from the mean entropy.

    Args:
        entropy: mean entropy of each evaluation, in nats.
        num_classes: K.
        method: a recipe's method, with its name.

    Example:
        >>> alpha_curve([0.0], 10, {"name": "labo", "alpha": 0.3})
        {'rho': None, 'used': True, 'values': [0.3]}
        >>> alpha_curve([0.0], 10, {"name": "ls", "alpha": 0.1})
        {'rho': 0.5, 'used': False, 'values': [1.0]}
    """
    from ...smoothing import alpha_of_entropy

    used = method["name"] == "labo"
    if used and not isinstance(method.get("alpha", "adaptive"), str):
        return {"rho": None, "used": True, "values": [method["alpha"]] * len(entropy)}
    rho = method.get("rho", 0.5) if used else 0.5
    values = [None if h is None else alpha_of_entropy(h, num_classes, rho) for h in entropy]
    return {"rho": rho, "used": used, "values": values}
