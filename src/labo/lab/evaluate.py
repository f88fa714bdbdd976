"""From a finished run to its scores, and to one record per example."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from accelerate import Accelerator

from .recipes import recipe_of
from .run.directory import RunDirectory
from .tasks import find_task, load_model
from .train import on_cpu, owned, repair_best


def _notice(text: str) -> None:
    print(f"labo: {text}", file=sys.stderr)


def evaluate_run(
    path: str | Path,
    splits: Iterable[str],
    beams: Sequence[int] = (),
    *,
    accept_data: bool = False,
) -> dict[str, dict[str, float]]:
    """Score the selected model of a run and write ``records/SPLIT.jsonl``.

    ``records/examples.json`` has a few samples of the last split with all their logits. If the
    results of the run lack a split (``labo train --no-test``), its scores are added. A damaged
    ``best`` is written again from a checkpoint if one has the selected weights.

    Args:
        path: the run directory.
        splits: "valid", "test".
        beams: for translation, further beam sizes at which the length of the output is measured.
        accept_data: evaluate although the data of the run have changed.

    Returns:
        split -> metric -> value.

    Raises:
        RequestError: the run is in use or damaged, or its data have changed.
    """
    run = RunDirectory(path)
    recipe = recipe_of(run)
    accelerator = Accelerator(cpu=on_cpu(), mixed_precision=recipe.train.precision)
    task = find_task(recipe.task)(recipe)
    if not accept_data:
        run.check_data(task.fingerprint)
    with owned(run, accelerator):
        if accelerator.is_main_process:
            if accept_data:
                run.accept_data(task.fingerprint)
            repair_best(run, recipe, task, task.build_model, _notice)
        accelerator.wait_for_everyone()
        model = load_model(run).to(accelerator.device)
        scores = {}
        for split in splits:
            evaluation = task.evaluate(model, split, accelerator, beams=beams)
            scores[split] = evaluation.metrics
            if accelerator.is_main_process:
                lines = (json.dumps(record) + "\n" for record in evaluation.records)
                run.write_records(f"{split}.jsonl", lines)
                examples = task.examples(model, split, accelerator)
                run.write_records("examples.json", [json.dumps(examples) + "\n"])
        if accelerator.is_main_process and run.finished:
            run.complete(scores)
    return scores
