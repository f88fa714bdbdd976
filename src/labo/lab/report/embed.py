"""The samples of the label explorer, small enough to be part of the page.

Of a vocabulary of 32 000 tokens the most probable ones are embedded one by one, and the others in
groups of nearly equal logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..analysis.reading import read_examples
from .gather import ReportGroup
from .task import find_report

_NAMED = 100  # classes of a sample that are embedded one by one
_WIDTH = 0.02  # of a group of logits: its probability is off by 2e-5 at most
_EXAMPLES = 60


def explorer_data(groups: Sequence[ReportGroup]) -> dict[str, Any] | None:
    """The samples of every run with ``records/examples.json``; None if there are none.

    Args:
        groups: all groups of the report. The samples of LABO come first.
    """
    examples: list[dict[str, Any]] = []
    variants = [(group, variant) for group in groups for variant in group.variants]
    for group, variant in sorted(variants, key=lambda pair: pair[1].name != "labo"):
        run = variant.members[0].run  # one seed of each method is enough
        content = read_examples(run) or {"examples": []}
        class_name = find_report(group.task).class_name
        for example in content["examples"]:
            if not math.isfinite(example["logits"][example["target"]]):
                continue  # a masked target has no label
            sample = _sample(example, content["classes"], class_name)
            examples.append(sample | {"title": example["title"], "run": run.name})
    return {"examples": examples[:_EXAMPLES]} if examples else None


def _sample(
    example: Mapping[str, Any], classes: Sequence[str], class_name: Callable[[str], str]
) -> dict[str, Any]:
    """A sample with its classes by descending logit; the target is always one of them."""
    logits = {i: float(logit) for i, logit in enumerate(example["logits"])}
    present = {i: logit for i, logit in logits.items() if math.isfinite(logit)}  # -inf is masked
    order = sorted(present, key=lambda i: (-present[i], i))
    named = order[:_NAMED]
    if example["target"] not in named:
        named.append(example["target"])
    tail: dict[int, list[float]] = {}
    for i in order[_NAMED:]:
        if i != example["target"]:
            tail.setdefault(round(present[i] / _WIDTH), []).append(present[i])
    image = example.get("image")
    return {
        "K": len(classes),
        "classes": [class_name(classes[i]) for i in named],
        "logits": [round(logits[i], 5) for i in named],
        "tail": [[round(sum(ls) / len(ls), 5), len(ls)] for ls in tail.values()],
        "target": named.index(example["target"]),
        "image": image if isinstance(image, str) and image.startswith("data:image/") else None,
        "context": example.get("context"),
    }
