"""Metrics that a model or a loss collects, and how a ``Trainer`` logs them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from ...metrics import LossMetrics

# As in LossMetrics.means, except that TRL has a name for the accuracy.
_NAMES = {"accuracy": "mean_token_accuracy"}


class Collected:
    """Sums of metrics since they were last taken, of training and of evaluation."""

    def __init__(self) -> None:
        self._sums: dict[bool, LossMetrics] = {}  # by whether they are of training

    def add(self, found: LossMetrics, *, training: bool) -> None:
        before = self._sums.get(training)
        self._sums[training] = found if before is None else before.plus(found)

    def take(self, training: bool) -> LossMetrics | None:
        return self._sums.pop(training, None)


def log_metrics(trainer: Trainer, collected: Collected) -> None:
    """Let a Trainer add the means of the metrics to its logs, over all of its processes."""
    own: Callable[..., None] = trainer.log

    @functools.wraps(own)
    def log(logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        training = trainer.model.training
        means = _over_processes(trainer, collected.take(training)).means()
        prefix = ""
        if not training:  # logs of an evaluation have the name of the data set in front
            means.pop("alpha", None)  # its loss is the cross entropy
            prefix = next((key[:-4] for key in logs if key.endswith("_loss")), "eval_")
        named = {prefix + _NAMES.get(name, name): value for name, value in means.items()}
        logs.update({name: value for name, value in named.items() if name not in logs})
        own(logs, *args, **kwargs)

    trainer.log = log
    trainer.add_callback(_Forget(collected))


def _over_processes(trainer: Any, found: LossMetrics | None) -> LossMetrics:
    if found is None:
        device = trainer.args.device
        found = LossMetrics(*torch.zeros(6, dtype=torch.float64, device=device))
    if trainer.args.world_size == 1:
        return found
    stacked = torch.stack([x.to(trainer.args.device) for x in found])
    return LossMetrics(*trainer.accelerator.reduce(stacked, "sum"))


class _Forget(TrainerCallback):  # type: ignore[misc]
    """Forgets what nothing logs: the batches of ``predict``, and the steps of a train() before."""

    def __init__(self, collected: Collected) -> None:
        self.collected = collected

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.collected.take(training=True)

    def on_predict(self, *args: Any, **kwargs: Any) -> None:
        self.collected.take(training=False)
