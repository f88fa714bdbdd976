"""From a finished run to its scores, and to one record per example."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .calibrate import stored_or_fitted
from .recipes import recipe_of
from .run.calibration import read_calibration
from .run.directory import RunDirectory
from .run.distributed import make_accelerator, owned
from .run.progress import ProgressBars
from .selection import load_repaired
from .tasks import find_task


def evaluate_run(
    path: str | Path,
    splits: Iterable[str],
    options: Mapping[str, Any] | None = None,
    *,
    accept_data: bool = False,
) -> dict[str, dict[str, float]]:
    """Score the selected model of a run and write ``records/SPLIT.jsonl``.

    ``records/examples.json`` has a few samples of the last split with all their logits. If the
    results of the run lack a split (``labo train --no-test``), its scores are added. If they are of
    another model (before ``labo calibrate --fold``), all their splits are scored again. A damaged
    ``best`` is written again from a checkpoint if one has the selected weights.

    Scores and records are those of the model as it is saved. Beside them stands what a temperature
    makes of them (``calibrated_nll``, and in the records ``tempered``): that of ``labo calibrate``
    if the run has one, else the one that fits the validation split.

    Args:
        path: the run directory.
        splits: "valid", "test".
        options: values of the ``evaluate_options`` of the task.
        accept_data: evaluate although the data of the run have changed.

    Returns:
        split -> metric -> value.

    Raises:
        RequestError: the run is in use or damaged, or its data have changed.
    """
    run = RunDirectory(path)
    recipe = recipe_of(run)
    accelerator = make_accelerator(recipe.train.precision)
    task = find_task(recipe.task)(recipe)
    if not accept_data:
        run.check_data(task.fingerprint)
    scores = {}
    with owned(run), ProgressBars(silent=not accelerator.is_main_process):
        if accelerator.is_main_process and accept_data:
            run.accept_data(task.fingerprint)
        model = load_repaired(run, task, accelerator)
        given = dict(options or {})
        if (temperature := stored_or_fitted(run, task, model, accelerator)) is not None:
            given["temperature"] = temperature
        # After a fold the scores of all splits are of another model.
        for split in dict.fromkeys([*splits, *run.stale_splits()]):
            evaluation = task.evaluate(model, split, accelerator, **given)
            scores[split] = evaluation.metrics
            if accelerator.is_main_process:
                lines = (json.dumps(record) + "\n" for record in evaluation.records)
                run.write_records(f"{split}.jsonl", lines)
                if (examples := task.examples(model, split, accelerator)) is not None:
                    run.write_records("examples.json", [json.dumps(examples) + "\n"])
        if accelerator.is_main_process and run.finished:
            known = read_calibration(run.best)
            run.complete(scores, known.temperature if known and known.folded else 1.0)
    return scores
