"""From a finished run to its temperature: fitted on the validation split, stored with the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from ..calibration import TemperatureError, TemperatureFit, fit_temperature
from .errors import RequestError
from .recipes import recipe_of
from .run import files as atomic
from .run.calibration import FILE, Calibration, read_calibration
from .run.directory import MODEL, RunDirectory, made_with, write_model
from .run.distributed import make_accelerator, owned
from .selection import load_repaired
from .tasks import Task, find_task

_SPLIT = "valid"


def calibrate_run(path: str | Path, *, fold: bool = False) -> Calibration:
    """Fit a temperature to the selected model of a run, and write ``best/calibration.json``.

    What is there already is fitted again, unless it is folded into the model.

    Args:
        path: the run directory; the run must be finished.
        fold: divide the logits of the saved model for good.

    Returns:
        What was written.

    Raises:
        RequestError: no temperature is best, the run is not finished, or its model is folded.
    """
    run = RunDirectory(path)
    recipe = recipe_of(run)
    run.must_have(run.results_file)
    _must_not_be_folded(run)
    accelerator = make_accelerator(recipe.train.precision)
    task = find_task(recipe.task)(recipe)
    run.check_data(task.fingerprint)
    with owned(run):
        model = load_repaired(run, task, accelerator)
        return _calibrate(run, task, model, accelerator, fold)


def _calibrate(
    run: RunDirectory, task: Task, model: nn.Module, accelerator: Accelerator, fold: bool
) -> Calibration:
    try:
        fit = _fit(task, model, accelerator)
    except TemperatureError as error:
        raise RequestError(f"{run.path}, {_SPLIT} split: {error}") from error
    calibration = Calibration(
        temperature=fit.temperature,
        folded=fold,
        split=_SPLIT,
        data=task.fingerprint,
        targets=fit.count,
        nll_before=fit.nll_before,
        nll_after=fit.nll_after,
        model=atomic.sha256(run.best / MODEL),
        made_with=made_with(),
    )
    if fold:
        task.fold_temperature(model, fit.temperature)
    if accelerator.is_main_process:
        if fold:  # model and temperature in one, so that a killed fold is either not done or whole
            write_model(
                run.best,
                *task.model_files(model, model.state_dict()),
                lambda model: {FILE: calibration.model_copy(update={"model": model}).as_json()},
            )
        else:
            atomic.write_text(run.best / FILE, calibration.as_json())
    accelerator.wait_for_everyone()
    written = read_calibration(run.best)
    assert written is not None
    return written


def _must_not_be_folded(run: RunDirectory) -> None:
    """Refuse to fit again what is folded in; a file of another model is replaced."""
    try:
        known = read_calibration(run.best)
    except RequestError:
        return
    if known is not None and known.folded:
        raise RequestError(
            f"{run.best / FILE}: the temperature {known.temperature:.4g} is folded into the model "
            "already"
        )


def stored_or_fitted(
    run: RunDirectory, task: Task, model: nn.Module, accelerator: Accelerator
) -> float | None:
    """What the logits of the selected model are divided by when it is evaluated.

    The temperature of ``labo calibrate``, 1 if it is folded into the model. Without one the
    temperature that fits the validation split, if the records must hold what it makes of them;
    else, or if none is best, None.
    """
    stored = read_calibration(run.best)
    if stored is not None:
        return stored.divisor
    if not task.tempered_records:
        return None
    try:
        return _fit(task, model, accelerator).temperature
    except TemperatureError:
        return None


def _fit(task: Task, model: nn.Module, accelerator: Accelerator) -> TemperatureFit:
    batches = _Replayed(lambda: task.logits(model, _SPLIT, accelerator))
    return fit_temperature(batches, reduce=_sum_over(accelerator))


class _Replayed:
    """Batches that are computed once and kept if they are small, and computed each time if not."""

    _KEPT = 1 << 26  # numbers: 256 MB of float32

    def __init__(self, compute: Callable[[], Iterable[tuple[Tensor, Tensor]]]) -> None:
        self.compute = compute
        self.kept: list[tuple[Tensor, Tensor]] | None = None

    def __call__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.kept is not None:
            yield from self.kept
            return
        batches: list[tuple[Tensor, Tensor]] | None = []
        size = 0
        for logits, target in self.compute():
            size += logits.numel()
            if batches is not None:
                batches.append((logits.cpu(), target.cpu()))
                batches = batches if size <= self._KEPT else None
            yield logits, target
        self.kept = batches


def _sum_over(accelerator: Accelerator) -> Callable[[Tensor], Tensor] | None:
    """Sums a tensor over the processes, with the same bits in each of them."""
    if accelerator.num_processes == 1:
        return None
    return lambda share: torch.stack(gather_object([share])).sum(0)
