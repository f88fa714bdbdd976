"""Where metrics are logged besides ``metrics.jsonl``: the experiment trackers of accelerate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Recipe
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
            tracker.store_init_configuration(_flat(recipe.as_document()))


def _flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested document as dotted keys and plain values."""
    found: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{prefix}{key}.")
        else:
            plain = isinstance(value, bool | int | float | str)
            found[f"{prefix}{key}"] = value if plain else str(value)
    return found
