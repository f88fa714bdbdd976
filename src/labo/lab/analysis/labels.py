r"""Figure 1c of the paper: the one-hot, the smoothed and the LABO label of one sample.

.. math:: \hat P = (1-\alpha)\,\mathrm{onehot}(y) + \alpha P_{ls}

The labels are those of the losses themselves, :func:`labo.label_of`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .reading import Floats

DISTRIBUTIONS = ("prediction", "one_hot", "ls", "labo")

# The explorer of the report has numbers for these positions of its sliders.
STEP = 0.05
TAUS = tuple(round(0.5 + STEP * i, 2) for i in range(51))
STRENGTHS = tuple(round(STEP * i, 2) for i in range(21))
DIGITS = 6  # of the numbers for the explorer, which shows three


def smoothed_labels(
    logits: Floats,
    target: int,
    *,
    alpha_ls: float = 0.1,
    tau: float = 1.25,
    rho: float = 0.5,
    alpha: float | None = None,
) -> dict[str, Any]:
    """The prediction and the labels of one sample, each (K,), and LABO's alpha.

    A class with logit -inf is masked and gets no mass. ``alpha`` is a fixed alpha of LABO.

    Example:
        >>> labels = smoothed_labels(np.array([2.0, 1.0, 0.1, -1.0]), 0)
        >>> labels["labo"].round(4), round(labels["alpha"], 4)
        (array([0.7181, 0.167 , 0.0813, 0.0337]), 0.6535)
    """
    # Loaded here: a report of analyzed runs needs no torch.
    import torch

    from ... import LabelSmoothingLoss, LABOLoss, label_of, smoothing

    z, label = torch.tensor(logits, dtype=torch.float64), torch.tensor(target)
    strength = smoothing.adaptive_alpha(z, rho) if alpha is None else alpha
    ours = LABOLoss(tau=tau, rho=rho, alpha="adaptive" if alpha is None else alpha)
    labels = {
        "prediction": smoothing.tempered(z, 1.0),
        "one_hot": smoothing.smoothed_target(label, smoothing.uniform(z), 0.0),
        "ls": label_of(LabelSmoothingLoss(alpha=alpha_ls), z, label),
        "labo": label_of(ours, z, label),
    }
    return {**{name: mass.numpy() for name, mass in labels.items()}, "alpha": float(strength)}


def slider_labels(logits: Floats, index: Sequence[int]) -> dict[str, Any]:
    """What the sliders of the report's explorer need of one sample; ``index``: the classes shown.

    A label is linear in alpha, and adaptive alpha is linear in rho, so that a page can interpolate
    between the ends: alpha is given at rho = 0 and at rho = 1. uniform is the mass of label
    smoothing, optimal P* for each of ``TAUS``, and classes the number of those that are not masked.

    Example:
        >>> sliders = slider_labels(np.array([2.0, 1.0, 0.1, -1.0]), [0, 1])
        >>> sliders["alpha"], sliders["uniform"], sliders["optimal"][TAUS.index(1.25)]
        ([1.0, 0.307021], [0.25, 0.25], [0.568583, 0.255481])
    """
    import torch

    from ... import smoothing
    from ...rows import entropy

    z = torch.tensor(logits, dtype=torch.float64)

    def shown(distribution: torch.Tensor) -> list[float]:
        return [round(mass, DIGITS) for mass in distribution[list(index)].tolist()]

    return {
        "classes": int((z != -torch.inf).sum()),
        "entropy": round(float(entropy(z.log_softmax(-1))), DIGITS),
        "alpha": [round(float(smoothing.adaptive_alpha(z, rho)), DIGITS) for rho in (0.0, 1.0)],
        "uniform": shown(smoothing.uniform(z)),
        "optimal": [shown(smoothing.tempered(z, tau)) for tau in TAUS],
    }


@functools.cache
def stationary_table(num_classes: int) -> dict[str, list[list[float]]]:
    """The confidence that LABO leads a fitted sample to, for the report's explorer.

    For each of ``TAUS`` it has a row of the confidences at each rho (adaptive) or alpha (fixed) of
    ``STRENGTHS``.
    """
    from ...smoothing import stationary_confidence

    def table(settings: Sequence[Mapping[str, float]]) -> list[list[float]]:
        return [
            [
                round(stationary_confidence(num_classes, tau=tau, **setting), DIGITS)
                for setting in settings
            ]
            for tau in TAUS
        ]

    return {
        "adaptive": table([{"rho": rho} for rho in STRENGTHS]),
        "fixed": table([{"alpha": alpha} for alpha in STRENGTHS]),
    }


def shown_labels(
    logits: Floats, target: int, classes: Sequence[str], *, top: int = 10, **hyper: Any
) -> dict[str, Any]:
    """:func:`smoothed_labels` over the ``top`` most probable classes and the target.

    The classes are in descending order of probability, ``target`` is the place of the target among
    them, and ``rest`` the mass on all other classes.

    Example:
        >>> labels = shown_labels(np.array([2.0, 1.0, 0.0, 3.0]), 2, ["a", "b", "c", "d"], top=2)
        >>> labels["classes"], labels["target"], labels["rest"]["one_hot"]
        (['d', 'a', 'c'], 2, 0.0)
    """
    labels = smoothed_labels(logits, target, **hyper)
    order = np.argsort(-labels["prediction"], kind="stable")
    chosen = order[:top]
    index = chosen if target in chosen else np.append(chosen, target)
    return {
        "alpha": labels["alpha"],
        "classes": [classes[i] for i in index],
        "target": int(np.flatnonzero(index == target)[0]),
        **{name: labels[name][index].tolist() for name in DISTRIBUTIONS},
        "rest": {name: max(0.0, float(1 - labels[name][index].sum())) for name in DISTRIBUTIONS},
        "sliders": slider_labels(logits, index.tolist()),
    }


def label_settings(method: Mapping[str, Any], num_classes: int | None = None) -> dict[str, Any]:
    """The hyper-parameters of the labels of a run: its own where its method has them.

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
        settings |= {key: method[key] for key in ("tau", "rho") if method.get(key) is not None}
        if method.get("confidence") is not None and num_classes is not None:
            from ...smoothing import tau_for_confidence

            strength = {key: method[key] for key in ("alpha", "rho")}
            settings["tau"] = tau_for_confidence(method["confidence"], num_classes, **strength)
        settings["alpha_ls"] = method.get("warmup_alpha", 0.1)
        if not isinstance(method.get("alpha", "adaptive"), str):
            settings["alpha"] = method["alpha"]
    return settings
