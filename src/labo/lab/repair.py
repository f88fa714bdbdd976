"""The selected model of a run, written again from a checkpoint if it is missing or damaged."""

from __future__ import annotations

from collections.abc import Callable

from accelerate import Accelerator
from torch import Tensor, nn

from .config import Recipe
from .run.checkpoint import Checkpoints
from .run.checksums import DamagedError
from .run.directory import RunDirectory, write_model
from .run.progress import notice
from .tasks import Task, load_model


def repair_best(
    run: RunDirectory,
    recipe: Recipe,
    task: Task,
    build: Callable[[], nn.Module],
    report: Callable[[str], None],
) -> None:
    """Write ``best`` again from a checkpoint if it is missing or damaged.

    ``build`` makes a model of the task, for its structure. ``report`` is called with a sentence if
    ``best`` had to be written again. It is a DamagedError if no checkpoint has its weights.
    """
    try:
        run.verify_best()
    except DamagedError as error:
        step, weights = _selected_weights(run, recipe)
        if step == 0:
            raise  # nothing was selected yet
        if weights is None:
            raise DamagedError(
                f"{error}, and no checkpoint has the selected model of step {step}: train the "
                "recipe again with another --out"
            ) from error
        calibrated = (run.best / "calibration.json").is_file()
        write_model(run.best, *task.model_files(build(), weights))
        lost = ", without its temperature: run labo calibrate again" if calibrated else ""
        report(f"{error}; {run.best} was written again from the checkpoint of step {step}{lost}")


def load_repaired(
    run: RunDirectory, recipe: Recipe, task: Task, accelerator: Accelerator
) -> nn.Module:
    """The selected model on the device, after :func:`repair_best`. All processes call this."""
    if accelerator.is_main_process:
        repair_best(run, recipe, task, task.build_model, notice)
    accelerator.wait_for_everyone()
    return load_model(run).to(accelerator.device)


def _selected_weights(run: RunDirectory, recipe: Recipe) -> tuple[int, dict[str, Tensor] | None]:
    """The step of the selected model, and its weights if a checkpoint has them."""
    step = run.results().get("selected_step") if run.finished else None
    saved = Checkpoints(run.checkpoints, recipe.digest())
    for checkpoint in saved.usable(report=lambda reason: None):
        if step is None:
            step = checkpoint.counters.best_step
        if checkpoint.counters.step == step:
            averaged = run.finished and recipe.train.average_last
            own = "model" if recipe.train.ema is None else "ema"
            return step, checkpoint.group("average" if averaged else own)
    return step or 0, None
