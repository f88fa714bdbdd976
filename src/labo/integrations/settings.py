"""The hyper-parameters of a loss in a checkpoint: a training is resumed with the same ones."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import nn

from ..loss import Loss

# Attributes that do not change the loss, or that change in training.
_NOT_SETTINGS = ("training", "steps_done", "impl", "inplace")
# Buffers of the losses of labo that change in training.
_LEARNED = ("epoch", "table", "sums", "counts", "steps")


def settings_of(loss: nn.Module) -> dict[str, Any]:
    """The hyper-parameters of a loss and of the losses inside it, for JSON."""
    found: dict[str, Any] = {}
    for path, part in loss.named_modules():
        prefix = f"{path}." if path else ""
        found[f"{prefix}class"] = type(part).__name__
        for name, value in vars(part).items():
            simple = value is None or isinstance(value, bool | int | float | str)
            if simple and not name.startswith("_") and name not in _NOT_SETTINGS:
                found[prefix + name] = value
        for name, tensor in part.named_buffers(recurse=False):
            if name == "weight" or (isinstance(part, Loss) and name not in _LEARNED):
                digest = hashlib.sha256(tensor.detach().double().cpu().numpy().tobytes())
                found[prefix + name] = f"a tensor ({digest.hexdigest()[:8]})"
    return found


def check_settings(saved: dict[str, Any], loss: nn.Module) -> None:
    """Raise an error if a checkpoint was written with another loss or other hyper-parameters."""
    ours = settings_of(loss)
    # a class before its hyper-parameters
    for name in sorted({**saved, **ours}, key=lambda name: not name.endswith("class")):
        before, now = saved.get(name), ours.get(name)
        if before != now:
            raise ValueError(
                f"the checkpoint has the state of another loss: its {name} is {before!r} and that "
                f"of {type(loss).__name__} is {now!r}. Resume with the same loss, or start a new "
                "training"
            )
