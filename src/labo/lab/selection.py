"""Which evaluated models of a run are selected, averaged and kept.

The selected one is in ``best``. If that is damaged it is written again from a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor, nn

from .config import Recipe
from .run.checkpoint import Checkpoints, KeptModel, RunState
from .run.checksums import DamagedError
from .run.directory import RunDirectory, write_model
from .run.progress import notice
from .run.sharding import DataParallel
from .schedule import Schedule
from .tasks import Task, load_model


def ranked(models: Iterable[KeptModel], higher_is_better: bool) -> list[KeptModel]:
    """The best first; of equal scores the one with the lower NLL, then the later one."""
    sign = -1 if higher_is_better else 1

    def rank(model: KeptModel) -> tuple[float, float, int]:
        return sign * model.score, math.inf if model.nll is None else model.nll, -model.step

    return sorted(models, key=rank)


class Selection:
    """The evaluated models of a run. All processes call its methods."""

    def __init__(
        self,
        run: RunDirectory,
        task: Task,
        schedule: Schedule,
        state: RunState,
        parallel: DataParallel,
    ) -> None:
        self.run, self.task, self.schedule = run, task, schedule
        self.state, self.parallel = state, parallel
        self.higher_is_better = task.higher_is_better[schedule.train.select]

    def is_best(self, model: KeptModel) -> bool:
        """Whether a model is to be selected, compared with the one that is."""
        counters = self.state.counters
        if counters.best is None:
            return True
        best = KeptModel(step=counters.best_step, score=counters.best, nll=counters.best_nll)
        return ranked([best, model], self.higher_is_better)[0] == model

    def add(self, model: KeptModel, weights: Mapping[str, Tensor]) -> None:
        """Select, average and keep the model that was evaluated with these weights."""
        counters = self.state.counters
        selected = self.is_best(model)
        improved = selected and model.score != counters.best
        counters.stale = 0 if improved else counters.stale + 1
        if selected:
            counters.best, counters.best_nll = model.score, model.nll
            counters.best_step = model.step
            self.select(weights)
        if self.schedule.is_averaged(model.step):
            counters.averaged += 1
            _blend(self.state.average, self.state.model.state_dict(), 1 / counters.averaged)
        self._keep(model)
        counters.evaluated = model.step

    def select(self, weights: Mapping[str, Tensor]) -> None:
        """Put weights into ``best``."""
        whole = self.parallel.whole(weights)
        if self.parallel.accelerator.is_main_process:
            write_model(self.run.best, *self.task.model_files(self.state.model, whole))
        self.parallel.accelerator.wait_for_everyone()

    def _keep(self, model: KeptModel) -> None:
        """Keep the weights if they are among the best or the last ones."""
        counters, train = self.state.counters, self.schedule.train
        known = [*counters.kept, model]
        last = known[max(0, len(known) - train.keep_last) :]
        best = ranked(known, self.higher_is_better)[: train.keep_best]
        counters.kept = [one for one in known if one in last or one in best]
        if model in counters.kept:
            weights = self.parallel.whole(self.state.model.state_dict())
            if self.parallel.accelerator.is_main_process:
                self.run.keep_model(model.step, weights)


def follow(state: RunState, decay: float) -> None:
    """ema <- d ema + (1 - d) weights, with d = min(decay, (1 + t) / (10 + t)) after t steps.

    The smaller d of the first steps keeps the average from remembering the random start.
    """
    done = state.counters.step
    _blend(state.ema, state.model.state_dict(), 1 - min(decay, (1 + done) / (10 + done)))


@contextmanager
def evaluated_weights(state: RunState) -> Iterator[dict[str, Tensor]]:
    """The weights that are evaluated, which the model has meanwhile: its own or the average.

    The running statistics are those of the first process.
    """
    model = state.model
    for buffer in model.buffers():
        broadcast(buffer)
    if not state.ema:
        yield model.state_dict()
        return
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        model.load_state_dict(state.ema)
        for buffer in model.buffers():
            broadcast(buffer)
        yield model.state_dict()
    finally:
        model.load_state_dict(own)


@torch.no_grad()
def _blend(average: dict[str, Tensor], weights: Mapping[str, Tensor], share: float) -> None:
    """Move an average towards weights by a share; what is new or not a float is copied."""
    for name, tensor in weights.items():
        if name in average and tensor.is_floating_point():
            average[name].lerp_(tensor, share)
        else:
            average[name] = tensor.clone()


# ------------------------------------------------------------------ the selected model, again


def repair_best(
    run: RunDirectory,
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
        step, weights = _selected_weights(run, task.recipe)
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


def load_repaired(run: RunDirectory, task: Task, accelerator: Accelerator) -> nn.Module:
    """The selected model on the device, after :func:`repair_best`. All processes call this."""
    if accelerator.is_main_process:
        repair_best(run, task, task.build_model, notice)
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
