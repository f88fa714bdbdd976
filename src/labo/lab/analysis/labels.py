r"""Figure 1c of the paper: the one-hot, the smoothed and the LABO label of one sample.

.. math:: \hat P = (1-\alpha)\,\mathrm{onehot}(y) + \alpha P_{ls}

with :math:`P_{ls} = 1/K` for label smoothing and :math:`P^* = \mathrm{softmax}(z/\tau)` for LABO,
whose :math:`\alpha` is :math:`1 - \rho H(p) / \log K` unless it is fixed. These are the formulas
of ``labo.smoothing`` in numpy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .calibration import tempered
from .reading import Floats

DISTRIBUTIONS = ("prediction", "one_hot", "ls", "optimal", "labo")


def smoothed_labels(
    logits: Floats,
    target: int,
    *,
    alpha_ls: float = 0.1,
    tau: float = 1.25,
    rho: float = 0.5,
    alpha: float | None = None,
) -> dict[str, Any]:
    """The labels of one sample.

    Args:
        logits: (K,); a class with logit -inf is masked and gets no mass.
        target: the true class.
        alpha_ls: strength of label smoothing.
        tau: temperature of LABO.
        rho: strength of LABO's adaptive alpha.
        alpha: a fixed alpha of LABO instead.

    Returns:
        prediction, one_hot, ls, optimal (P*) and labo, each (K,); and LABO's alpha.

    Example:
        >>> found = smoothed_labels(np.array([2.0, 1.0, 0.1, -1.0]), 0)
        >>> found["labo"].round(4), round(found["alpha"], 4)
        (array([0.7181, 0.167 , 0.0813, 0.0337]), 0.6535)
    """
    present = logits != -math.inf
    prediction, optimal = np.zeros(len(logits)), np.zeros(len(logits))
    log_p = tempered(logits[present], 1.0)
    prediction[present], optimal[present] = np.exp(log_p), np.exp(tempered(log_p, tau))
    if alpha is None:
        entropy = -float((prediction[present] * log_p).sum())
        alpha = 1 - rho * entropy / (math.log(len(logits)) if len(logits) > 1 else 1.0)
    one_hot = np.zeros(len(logits))
    one_hot[target] = 1.0
    return {
        "prediction": prediction,
        "one_hot": one_hot,
        "ls": (1 - alpha_ls) * one_hot + alpha_ls * present / present.sum(),
        "optimal": optimal,
        "labo": (1 - alpha) * one_hot + alpha * optimal,
        "alpha": alpha,
    }


def shown_labels(
    logits: Floats, target: int, classes: Sequence[str], *, top: int = 10, **hyper: Any
) -> dict[str, Any]:
    """:func:`smoothed_labels` over the most probable classes and the target.

    Args:
        logits: (K,).
        target: the true class.
        classes: (K,) names.
        top: the number of most probable classes.
        **hyper: for :func:`smoothed_labels`.

    Returns:
        classes and index of those shown, by descending probability; target, the index of the target
        among them; each distribution over them; and rest, the mass of each on all other classes.

    Example:
        >>> found = shown_labels(np.array([2.0, 1.0, 0.0, 3.0]), 2, ["a", "b", "c", "d"], top=2)
        >>> found["classes"], found["target"], found["rest"]["one_hot"]
        (['d', 'a', 'c'], 2, 0.0)
    """
    labels = smoothed_labels(logits, target, **hyper)
    order = np.argsort(-labels["prediction"], kind="stable")
    chosen = order[:top]
    index = chosen if target in chosen else np.append(chosen, target)
    return {
        "alpha": labels["alpha"],
        "classes": [classes[i] for i in index],
        "index": index.tolist(),
        "target": int(np.flatnonzero(index == target)[0]),
        **{name: labels[name][index].tolist() for name in DISTRIBUTIONS},
        "rest": {name: max(0.0, float(1 - labels[name][index].sum())) for name in DISTRIBUTIONS},
    }


def label_settings(method: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of the labels of a run: its own where its method has them.

    Args:
        method: a recipe's method, with its name.

    Example:
        >>> label_settings({"name": "labo", "tau": 1.15, "alpha": "adaptive", "rho": 0.5})
        {'alpha_ls': 0.1, 'tau': 1.15, 'rho': 0.5, 'alpha': None}
        >>> label_settings({"name": "ls", "alpha": 0.2})
        {'alpha_ls': 0.2, 'tau': 1.25, 'rho': 0.5, 'alpha': None}
    """
    settings: dict[str, Any] = {"alpha_ls": 0.1, "tau": 1.25, "rho": 0.5, "alpha": None}
    if method["name"] == "ls":
        settings["alpha_ls"] = method.get("alpha", 0.1)
    elif method["name"] == "labo":
        settings |= {key: method[key] for key in ("tau", "rho") if key in method}
        settings["alpha_ls"] = method.get("warmup_alpha", 0.1)
        if not isinstance(method.get("alpha", "adaptive"), str):
            settings["alpha"] = method["alpha"]
    return settings
