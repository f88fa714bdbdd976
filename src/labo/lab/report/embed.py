"""The samples of the label explorer. Their numbers are computed by the analysis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..analysis.labels import DIGITS, STEP, STRENGTHS, TAUS
from ..analysis.reading import read_examples
from .gather import ReportGroup
from .task import find_report

_EXAMPLES = 60


def explorer_data(groups: Sequence[ReportGroup]) -> dict[str, Any] | None:
    """The samples of every run with ``records/examples.json``, those of LABO first; None without
    any.
    """
    samples: list[dict[str, Any]] = []
    stationary: dict[str, Any] = {}
    variants = [(group, variant) for group in groups for variant in group.shown]
    for group, variant in sorted(variants, key=lambda pair: pair[1].name != "labo"):
        member = variant.runs[0]  # one seed of each method is enough
        analysis = member.analysis or {"labels": [], "stationary": {}}
        content = read_examples(member.run) or {"examples": []}
        class_names = find_report(group.task).class_names
        stationary |= analysis["stationary"]
        for label, example in zip(analysis["labels"], content["examples"], strict=True):
            if not math.isfinite(example["logits"][example["target"]]):
                continue  # a masked target has no label
            image = example.get("image")
            is_image = isinstance(image, str) and image.startswith("data:image/")
            samples.append(
                {
                    "title": label["title"],
                    "run": member.name,
                    "context": label["context"],
                    "image": image if is_image else None,
                    "names": class_names(label["classes"]),
                    "target": label["target"],
                    "onehot": label["one_hot"],
                    "p": [round(mass, DIGITS) for mass in label["prediction"]],
                    **label["sliders"],
                }
            )
    if not samples:
        return None
    samples = samples[:_EXAMPLES]
    needed = {str(sample["classes"]) for sample in samples}
    return {
        "examples": samples,
        "taus": TAUS,
        "strengths": STRENGTHS,
        "step": STEP,
        "stationary": {count: table for count, table in stationary.items() if count in needed},
    }
