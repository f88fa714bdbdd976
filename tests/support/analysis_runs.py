"""Handmade run directories for the tests of the analysis."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml


def write_run(
    path: Path,
    *,
    method: dict[str, Any] | None = None,
    seed: int = 0,
    task: str = "image_classification",
    num_classes: int = 3,
    results: dict[str, Any] | None = None,
    **sections: Any,
) -> Path:
    """A finished run without records."""
    (path / "records").mkdir(parents=True)
    (path / "best").mkdir()
    recipe = {"task": task, "seed": seed, "method": method or {"name": "base"}, **sections}
    recipe["made_with"] = {"labo": "0"}
    (path / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    facts = {"num_classes": num_classes}
    config = facts if task == "image_classification" else {"labo": facts}
    (path / "best" / "config.json").write_text(json.dumps(config))
    lines = [
        {"step": 5, "epoch": 1, "loss": 1.5, "lr": 0.1, "seconds": 1.0},
        {"step": 10, "epoch": 1, "valid": {"nll": 1.0, "entropy": 0.5, "confidence": 0.7}},
    ]
    write_lines(path / "metrics.jsonl", lines)
    results = results or {"signature": "labo:0"}
    (path / "results.json").write_text(json.dumps(results))
    return path


def write_lines(path: Path, records: list[Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def image_records(probabilities: np.ndarray, labels: np.ndarray) -> list[dict[str, Any]]:
    return [
        {
            "index": index,
            "label": int(label),
            "prediction": int(row.argmax()),
            "confidence": float(row.max()),
            "probabilities": row.tolist(),
        }
        for index, (row, label) in enumerate(zip(probabilities, labels, strict=True))
    ]


def drawn_images(
    size: int, classes: int, *, sharpness: float = 1.0, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Predictions and labels. The labels are drawn from the predictions at sharpness 1."""
    random = np.random.default_rng(seed)
    truth = random.dirichlet(np.full(classes, 0.4), size)
    labels = (random.random(size)[:, None] > truth.cumsum(-1)).sum(-1).clip(max=classes - 1)
    predicted = np.maximum(truth, 1e-12) ** sharpness
    return predicted / predicted.sum(-1, keepdims=True), labels


def sentence(
    reference: str = "the cat sat down",
    hypothesis: str = "the cat sat down",
    *,
    p: float = 0.5,
    tempered: float | None = None,
    frequency: float = 10.0,
    **fields: Any,
) -> dict[str, Any]:
    """A record of a translation; every token has probability ``p``, tempered ``tempered``."""
    tokens, reference_tokens = [*hypothesis.split(), "</s>"], [*reference.split(), "</s>"]
    n = len(reference_tokens)
    after = None
    if tempered is not None:
        after = {"temperature": 0.25, "probabilities": [tempered] * n, "confidence": [tempered] * n}
    return {
        "index": 0,
        "pair": "de-en",
        "source": reference.upper(),
        "reference": reference,
        "hypothesis": hypothesis,
        "source_tokens": reference.upper().split(),
        "tokens": tokens,
        "probabilities": [p] * len(tokens),
        "score": -1.0,
        "frequency": frequency,
        "forced": {
            "tokens": reference_tokens,
            "probabilities": [p] * n,
            "confidence": [p] * n,
            "right": [True] * n,
            "entropy": [0.1] * n,
            "tempered": after,
        },
        "reference_length": n,
        **fields,
    }
