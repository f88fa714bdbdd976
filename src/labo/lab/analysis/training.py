"""Curves over training from ``metrics.jsonl``: loss, scores, entropy, confidence, alpha."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

POINTS = 500  # at most, of a curve


def training_curves(metrics: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The logged steps and the evaluations of ``metrics.jsonl`` as columns.

    The loss has at most ``POINTS`` steps, evenly spaced; a metric is None where a line lacks it.

    Example:
        >>> lines = [{"step": 1, "loss": 2.0}, {"step": 1, "valid": {"nll": 1.5}}]
        >>> training_curves(lines)["valid"]
        {'step': [1], 'nll': [1.5]}
    """
    metrics = list(metrics)
    steps = [line for line in metrics if "loss" in line]
    if len(steps) > POINTS:
        steps = [steps[i] for i in np.linspace(0, len(steps) - 1, POINTS).round().astype(int)]
    evaluations = [line for line in metrics if line.get("valid")]
    names = dict.fromkeys(name for line in evaluations for name in line["valid"])
    columns = {name: [line["valid"].get(name) for line in evaluations] for name in names}
    return {
        "loss": {key: [line[key] for line in steps] for key in ("step", "loss")},
        "valid": {"step": [line["step"] for line in evaluations], **columns},
    }


def alpha_curve(
    entropy: Sequence[float | None], num_classes: int, method: Mapping[str, Any]
) -> list[float | None]:
    """LABO's mean alpha over training: the one a run used, or that LABO would have used.

    alpha is linear in the entropy, so its mean follows from the mean entropy, in nats.

    Example:
        >>> alpha_curve([0.0], 10, {"name": "labo", "alpha": 0.3})
        [0.3]
        >>> alpha_curve([0.0], 10, {"name": "ls", "alpha": 0.1})
        [1.0]
    """
    from ...smoothing import alpha_of_entropy

    ours = method if method["name"] == "labo" else {}
    if not isinstance(ours.get("alpha", "adaptive"), str):
        return [ours["alpha"]] * len(entropy)
    rho = ours.get("rho", 0.5)
    return [None if h is None else alpha_of_entropy(h, num_classes, rho) for h in entropy]
