"""The analysis of one split of an image classifier."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import calibration
from .reading import Floats, Images, Integers, Run, read_images
from .selective import aurc, choose_norm, excess_aurc, normalised_logit
from .views import verdict, view


def image_split(run: Run, split: str, notes: list[str]) -> dict[str, Any]:
    """A SPLIT, as :mod:`labo.lab.analysis.run` describes it.

    Args:
        run: the run.
        split: "valid" or "test"; what is fitted is fitted on valid, and applied to test only.
        notes: gets a sentence for what could not be done.
    """
    records = read_images(run, split)
    temperature, norm = _fitted(run, records, notes) if split == "test" else (None, None)
    views = {"before": image_view(records.log_p, records.labels)}
    sentence = f"{run.method['name']} {verdict(views['before'])}"
    if temperature is not None:
        scaled = calibration.tempered(records.log_p, temperature["value"])
        views["after"] = image_view(scaled, records.labels)
        sentence += f"; after one temperature, T = {temperature['value']:.3f}, it "
        sentence += verdict(views["after"])
    return {
        "examples": len(records),
        "views": views,
        "temperature": temperature,
        "logit_norm": norm,
        "verdict": sentence,
    }


def image_view(log_p: Floats, labels: Integers) -> dict[str, Any]:
    """A VIEW of whole distributions.

    Args:
        log_p: (N, K).
        labels: (N,).
    """
    p = np.exp(log_p)
    further = {
        "nll": calibration.nll(log_p, labels),
        "brier": calibration.brier(p, labels),
        "classwise_ece": calibration.classwise_ece(p, labels),
        "entropy": float(calibration.entropy(log_p).mean()),
    }
    return view(p.max(-1), p.argmax(-1) == labels, further=further)


def _fitted(
    run: Run, test: Images, notes: list[str]
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The temperature, and the norm of the logits with what it does on the test split."""
    if "valid" not in run.splits():
        notes.append("no temperature is fitted: there are no records of the valid split")
        return None, None
    valid = read_images(run, "valid")
    log_p = valid.log_p
    value = calibration.fit_temperature(log_p, valid.labels)
    temperature = None
    if value is None:
        why = "all predictions there are right" if valid.right.all() else "the NLL has no minimum"
        notes.append(f"no temperature can be fitted on the valid split: {why}")
    else:
        temperature = {
            "value": value,
            "fitted_on": "valid",
            "examples": len(valid),
            "nll_before": calibration.nll(log_p, valid.labels),
            "nll_after": calibration.nll(calibration.tempered(log_p, value), valid.labels),
        }
    p = choose_norm(log_p, valid.right)
    score = test.log_p.max(-1) if p is None else normalised_logit(test.log_p, p)
    areas = {"aurc": aurc(score, test.right), "excess_aurc": excess_aurc(score, test.right)}
    return temperature, {"p": p, **areas}
