"""Handmade run directories with the files of ``labo train`` and ``labo evaluate``."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import analysis_runs
from analysis_runs import sentence, write_lines

BASE = {"name": "base"}
LS = {"name": "ls", "alpha": 0.1}
LABO = {"name": "labo", "tau": 1.25, "alpha": "adaptive", "rho": 0.5}

# A grey dot, as a picture.
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mNoAAAAggCB"
    "bl5fLQAAAABJRU5ErkJggg=="
)
BLEU = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.5.1"
CONFIDENCE = {"base": 0.93, "ls": 0.85, "labo": 0.45}

SENTENCES = [
    ("Der Hund schläft am Fenster .", "The dog sleeps by the window ."),
    ("Morgen fährt ein Zug nach Norden .", "A train goes north tomorrow ."),
    ("Sie liest jeden Abend ein Buch .", "She reads a book every evening ."),
    ("Das Wasser im See ist kalt .", "The water in the lake is cold ."),
    ("Wir essen heute in der Küche .", "We are eating in the kitchen today ."),
    ("Ein Kind malt ein rotes Haus .", "A child paints a red house ."),
]
HOSTILE = (
    "</script><script>document.title='broken'</script><img src=x onerror=alert(1)> & \u2028 'q'"
)


def write_run(
    path: Path,
    method: Mapping[str, Any],
    seed: int = 0,
    *,
    task: str = "image_classification",
    finished: bool = True,
    records: bool = True,
) -> Path:
    """A run with three evaluations, by default finished and evaluated."""
    rng = random.Random(f"{method['name']} {seed}")
    images = task == "image_classification"
    classes = 10 if images else 400
    analysis_runs.write_run(
        path,
        method=dict(method),
        seed=seed,
        task=task,
        num_classes=classes,
        results=_results(method, seed, images, rng),
        data={"name": "digits"} if images else {"name": "cldr", "languages": ["de-en"]},
        model={"name": "small"},
    )
    score = {"accuracy": 0.9 + 0.01 * seed, "ece": 0.05} if images else {"token_accuracy": 0.6}
    sure = CONFIDENCE.get(method["name"], 0.8)
    metrics: list[dict[str, Any]] = []
    for epoch in (1, 2, 3):
        step = 10 * epoch
        metrics.append({"step": step, "epoch": epoch, "loss": 2.0 / epoch, "lr": 0.1})
        valid = {"nll": 1.5 / epoch, "entropy": 1.2 / epoch, "confidence": sure, **score}
        metrics.append({"step": step, "epoch": epoch, "valid": valid})
    write_lines(path / "metrics.jsonl", metrics if finished else metrics[:3])
    if not finished:
        (path / "results.json").unlink()
    elif records:
        for split in ("valid", "test"):
            made = image_records(sure, rng) if images else translation_records(sure, rng)
            write_lines(path / "records" / f"{split}.jsonl", made)
        write_examples(path, classes, rng)
    return path


def _results(
    method: Mapping[str, Any], seed: int, images: bool, rng: random.Random
) -> dict[str, Any]:
    hyper = ",".join(f"{key}={value}" for key, value in method.items())
    data = "digits@0123456789ab" if images else "cldr@ba9876543210"
    parts = f"labo:0.1.0|git:None|data:{data}|method:{hyper}|seed:{seed}|steps:30"
    lift = {"base": 0.0, "ls": 0.005, "labo": 0.01}.get(method["name"], 0.0) + rng.gauss(0, 0.001)
    if images:
        scores = {"accuracy": 0.95 + lift, "nll": 0.2, "ece": 0.03}
    else:
        scores = {"bleu": 60 + 100 * lift, "chrf": 70.0, "nll": 1.2, "length_ratio": 0.98}
    results = {"valid": scores, "test": scores, "signature": parts, "steps": 30}
    results |= {"seconds": 10.0 if method["name"] == "base" else 12.5, "peak_memory": 500_000_000}
    return results if images else results | {"sacrebleu": {"bleu": BLEU, "chrf": "nc:6"}}


def image_records(sure: float, rng: random.Random) -> list[dict[str, Any]]:
    labels = np.arange(120) % 10
    probabilities = np.empty((120, 10))
    for row, label in zip(probabilities, labels, strict=True):
        shown = label if rng.random() < 0.9 else (label + 1) % 10
        top = min(0.99, max(0.2, rng.gauss(sure, 0.08)))
        row[:] = (1 - top) / 9
        row[shown] = top
    return analysis_runs.image_records(probabilities, labels)


def translation_records(sure: float, rng: random.Random) -> list[dict[str, Any]]:
    def draw(n: int) -> list[float]:
        return [round(min(0.999, max(0.01, rng.gauss(sure, 0.1))), 4) for _ in range(n)]

    records = []
    for index, (source, reference) in enumerate(SENTENCES * 10):
        words = reference.split()
        said = [word for word in words if rng.random() < 0.93] or words
        tokens = [*(word if i == 0 else f"\u0120{word}" for i, word in enumerate(said)), "</s>"]
        truth = [*words, "</s>"]
        right = [rng.random() < 0.8 for _ in truth]
        confidence = draw(len(truth))
        records.append(
            sentence(
                reference,
                " ".join(said),
                index=index,
                source=f"{source} ({index})",
                source_tokens=source.split(),
                tokens=tokens,
                probabilities=draw(len(tokens)),
                frequency=float(100 + 37 * index % 1000),
                forced={
                    "tokens": truth,
                    "probabilities": [
                        c if r else 0.05 for c, r in zip(confidence, right, strict=True)
                    ],
                    "confidence": confidence,
                    "right": right,
                    "entropy": [1 - c for c in confidence],
                    "tempered": {
                        "temperature": 0.5,
                        "probabilities": [
                            c**0.5 if r else 0.02 for c, r in zip(confidence, right, strict=True)
                        ],
                        "confidence": [c**0.5 for c in confidence],
                    },
                },
                lengths={"1": len(tokens), "5": len(tokens), "20": max(1, len(tokens) - 1)},
            )
        )
    return records


def write_examples(path: Path, classes: int, rng: random.Random) -> None:
    """Two samples: a confident one, and one whose target is improbable."""
    names = (
        [str(i) for i in range(10)] if classes == 10 else [f"\u0120w{i}" for i in range(classes)]
    )
    examples = []
    for title, target, lift in (("sure", 3, 6.0), ("unlikely target", 7, -2.0)):
        logits = [round(rng.gauss(0, 1), 4) for _ in range(classes)]
        logits[target] += lift
        image = PIXEL if classes == 10 else None
        example = {"title": title, "target": target, "logits": logits, "image": image}
        examples.append({**example, "context": f"context of {title}"})
    document = {"classes": names, "examples": examples}
    (path / "records" / "examples.json").write_text(json.dumps(document))


def examples_of(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((path / "records" / "examples.json").read_text())
    return document


def make_hostile(path: Path) -> None:
    """Put markup into every text of a translation run that comes from a user."""
    records = path / "records" / "test.jsonl"
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    for key in ("source", "reference", "hypothesis"):
        lines[0][key] = HOSTILE
    lines[0]["tokens"][0] = HOSTILE
    write_lines(records, lines)
    examples = examples_of(path)
    examples["classes"][0] = examples["examples"][0]["title"] = HOSTILE
    examples["examples"][0]["context"] = HOSTILE
    examples["examples"][0]["logits"][0] = 9.0
    examples["examples"][0]["image"] = "http://example.org/spy.png"
    (path / "records" / "examples.json").write_text(json.dumps(examples))


def is_close(one: float, other: float) -> bool:
    """Equal to the three decimals that the page shows."""
    return math.isclose(one, other, abs_tol=0.000501)
