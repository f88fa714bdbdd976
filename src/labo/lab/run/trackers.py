"""Where metrics are logged besides ``metrics.jsonl``: the experiment trackers of accelerate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Recipe, flat
from ..errors import RequestError

if TYPE_CHECKING:
    from accelerate import Accelerator

_PROJECT = "labo"
_TENSORBOARD = "tensorboard"


def installed_trackers(names: Sequence[str]) -> list[str]:
    """These trackers. TensorBoard, which is the default, is left out if it is not installed.

    :func:`missing_tensorboard` is the line that says so. Any other one must be installed.
    """
    from accelerate.tracking import get_available_trackers

    available = {str(tracker) for tracker in get_available_trackers()}
    for name in names:
        if name not in available and name != _TENSORBOARD:
            raise RequestError(f"train.log_with: {name} is not installed: pip install {name}")
    return [name for name in names if name in available]


def missing_tensorboard(names: Sequence[str]) -> str | None:
    """What to say if these trackers include TensorBoard and it is not installed."""
    if _TENSORBOARD not in names or _TENSORBOARD in installed_trackers(names):
        return None
    install = f"pip install 'torch-labo[{_TENSORBOARD}]'"
    return f"metrics go to metrics.jsonl alone; to have them in TensorBoard too: {install}"


def start_trackers(accelerator: Accelerator, recipe: Recipe, path: Path, step: int) -> None:
    """Begin to log.

    The project is called labo and the run as its folder. The recipe is its configuration, except
    for TensorBoard, which has no use for it. What TensorBoard has of later steps is dropped.
    """
    name = path.resolve().name
    options: dict[str, dict[str, Any]] = {
        _TENSORBOARD: {"purge_step": step + 1},
        "wandb": {"name": name, "dir": str(path)},
        "mlflow": {"run_name": name},
        "trackio": {"name": name, "resume": "allow"},  # a continued run is the same run
    }
    accelerator.init_trackers(_PROJECT, init_kwargs=options)
    for tracker in accelerator.trackers:
        if tracker.name != _TENSORBOARD:
            keys = flat(recipe.as_document())
            plain = {k: v if isinstance(v, int | float | str) else str(v) for k, v in keys.items()}
            tracker.store_init_configuration(plain)
