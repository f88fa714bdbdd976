"""The average of models that a run kept: ``labo average``.

``train.keep_best`` and ``train.keep_last`` keep the weights of evaluated models in ``RUN/kept``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .errors import RequestError
from .recipes import recipe_of
from .run import checksums
from .run.checkpoint import KeptModel
from .run.directory import KEPT, RunDirectory, kept_name, write_model
from .run.distributed import make_accelerator, owned
from .run.files import (
    Document,
    explained,
    read_json,
    read_tensors,
    seal_fits,
    temporary,
    write_json,
)
from .run.progress import ProgressBars
from .selection import ranked
from .tasks import find_task

_MARK = "average.json"  # in a folder that ``labo average`` made


class _Mark(Document):
    """What a folder is the average of: the digest of the recipe."""

    recipe: str


class _Kept(Document):
    models: list[KeptModel]


@dataclass(frozen=True)
class Averaged:
    """An average."""

    folder: Path  # the model folder
    steps: tuple[int, ...]  # of the models in it
    scores: dict[str, dict[str, float]]  # split -> metric -> value


def average_models(
    path: str | Path,
    *,
    best: int | None = None,
    last: int | None = None,
    out: str | Path | None = None,
    splits: Iterable[str] = ("valid",),
) -> Averaged:
    """Write the average of the best or the last models of a run to a folder, and score it.

    By default all that are kept are averaged. The best are so by the score that selects the model.
    """
    run = RunDirectory(path)
    recipe = recipe_of(run)
    task = find_task(recipe.task)(recipe)
    run.check_data(task.fingerprint)
    folder = run.path / "average" if out is None else Path(out)
    accelerator = make_accelerator(recipe.train.precision)
    with owned(run), ProgressBars():
        models = _chosen(run, best, last, task.higher_is_better[recipe.train.select])
        weights = average_weights([_read(run, model) for model in models])
        if accelerator.is_main_process:
            _claim(folder, recipe.digest())
            write_model(folder, *task.model_files(task.build_model(), weights))
        accelerator.wait_for_everyone()
        model = task.load_model(folder).to(accelerator.device)
        scores = {split: task.evaluate(model, split, accelerator).metrics for split in splits}
    return Averaged(folder, tuple(model.step for model in models), scores)


def _claim(folder: Path, recipe: str) -> None:
    """Mark a folder as an average of a run of this recipe, before anything else is in it."""
    mark = folder / _MARK
    with explained("write", folder):
        folder.mkdir(parents=True, exist_ok=True)
        inside = {*folder.iterdir()} - {temporary(mark)}  # which a killed start leaves
    if not inside:
        write_json(mark, {"recipe": recipe})
    elif mark not in inside or read_json(mark, _Mark).recipe != recipe:
        raise RequestError(
            f"{folder} exists and is no average of this run: choose an --out that is new or empty"
        )


def _chosen(
    run: RunDirectory, best: int | None, last: int | None, higher_is_better: bool
) -> list[KeptModel]:
    """The models to average, in the order of their steps."""
    path = run.kept / KEPT
    if not path.is_file():
        raise RequestError(
            f"{run.path} kept no models: train with train.keep_best=N or train.keep_last=N"
        )
    if not seal_fits(read_json(path, Document).model_dump()):
        raise RequestError(f"{path} is damaged (its checksum does not fit)")
    kept = read_json(path, _Kept).models
    wanted = best or last or len(kept)
    if wanted > len(kept):
        raise RequestError(f"{run.path} kept {len(kept)} models, not {wanted}")
    if best is None:
        return kept[len(kept) - wanted :]
    return sorted(ranked(kept, higher_is_better)[:wanted], key=lambda model: model.step)


def _read(run: RunDirectory, model: KeptModel) -> dict[str, Tensor]:
    name = kept_name(model.step)
    known = checksums.manifest_of(run.kept).sha256
    if name not in known:
        raise RequestError(f"{run.kept / checksums.MANIFEST} has no checksum of {name}")
    checksums.verify(run.kept, {name: known[name]})
    return read_tensors(run.kept / name)


def average_weights(models: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of each weight, computed in float64; of counters, that of the last model.

    Example:
        >>> average_weights([{"a": torch.tensor([1.0])}, {"a": torch.tensor([4.0])}])
        {'a': tensor([2.5000])}
    """
    averaged = {}
    for name, last in models[-1].items():
        if last.is_floating_point():
            total = torch.stack([model[name].double() for model in models]).mean(0)
            averaged[name] = total.to(last.dtype)
        else:
            averaged[name] = last
    return averaged
