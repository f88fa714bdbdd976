"""Tasks: what is learned, from what, and how it is scored. The loop knows none of them by name.

``TASKS`` says where each lives; its module has a class ``Task`` that fits the protocol below and is
imported only when asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..config import Recipe

TASKS = {"image_classification": "labo.lab.tasks.image_classification"}


@dataclass(frozen=True)
class Batch:
    """Samples of the training split as the model takes them.

    Attributes:
        inputs: what the model is called with.
        target: (N, ...) class indices, -100 where nothing is to be learned; or probabilities.
        index: (N,) places of the samples in the training split; stays on the CPU.
        epoch: the epoch they were drawn for.
    """

    inputs: Any
    target: Tensor
    index: Tensor
    epoch: int

    def to(self, device: torch.device) -> Batch:
        return replace(
            self,
            inputs=self.inputs.to(device, non_blocking=True),
            target=self.target.to(device, non_blocking=True),
        )

    def without_targets(self) -> Batch:
        """The same inputs with nothing to learn from them."""
        shape = self.target.shape[:1] if self.target.is_floating_point() else self.target.shape
        nothing = torch.full(shape, -100, dtype=torch.int64, device=self.target.device)
        return replace(self, target=nothing)


@dataclass(frozen=True)
class Evaluation:
    """Scores of a model on a split, and what it said of each sample."""

    metrics: dict[str, float]
    records: Iterator[dict[str, Any]]


class Task(Protocol):
    """What the loop asks of a task. All of it is a pure function of recipe and arguments."""

    Recipe: ClassVar[type[Recipe]]
    higher_is_better: ClassVar[Mapping[str, bool]]  # the metrics a model can be selected by

    size: int  # samples of the training split
    num_classes: int
    steps_per_epoch: int
    fingerprint: str  # names exactly this data

    def __init__(self, recipe: Any) -> None: ...

    @staticmethod
    def model_from(config: Mapping[str, Any]) -> nn.Module:
        """A fresh model as ``model_config`` describes it."""

    def model_config(self) -> dict[str, Any]:
        """What is needed to build the model again, ``task`` and ``num_classes`` among it."""

    def build_model(self) -> nn.Module:
        """A fresh model, from PyTorch's generator."""

    def global_batch(self, epoch: int, position: int) -> Tensor:
        """The samples of a batch over all processes, (N,)."""

    def count(self, index: Tensor) -> int:
        """How many targets these samples have: what the mean loss divides by."""

    def batch(self, index: Tensor, epoch: int) -> Batch:
        """Samples as they look in this epoch."""

    def peers(self, batch: Batch) -> Batch:
        """For each sample of a batch another one of the same class."""

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """Run the model."""

    def evaluate(self, model: nn.Module, split: str, accelerator: Accelerator) -> Evaluation:
        """Score a model in eval mode on "valid" or "test", shared among the processes."""


def find_task(name: str) -> type[Task]:
    """The class of a task of ``TASKS``."""
    task: type[Task] = importlib.import_module(TASKS[name]).Task
    return task
