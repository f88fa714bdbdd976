"""The protocol of a task: its data, its model, its loss and its scores.

``TASKS`` names the class of each task. It is imported when it is first needed, so that importing
this module needs neither torch nor accelerate. Nothing outside of a task's own package may depend
on which task it is.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from .config import Recipe
from .errors import RequestError
from .run.directory import RunDirectory

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch import Tensor, nn

TASKS = {
    "image_classification": "labo.lab.images.task:ImageTask",
    "translation": "labo.lab.translation.task:TranslationTask",
    "language_modeling": "labo.lab.language_modeling.task:LanguageModelingTask",
}


@dataclass(frozen=True)
class Batch:
    """Samples of the training split as the model takes them.

    Attributes:
        inputs: what the model reads; has ``to(device)``.
        target: (N, ...) class indices, -100 where nothing is to be learned; or probabilities.
        index: (N,) indices of the samples in the training split; stays on the CPU.
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
        """The same inputs, with every target ignored."""
        soft = self.target.is_floating_point()
        target = self.target.new_full(self.target.shape[: 1 if soft else None], -100)
        return replace(self, target=target.long())


@dataclass(frozen=True)
class Evaluation:
    """Scores of a model on a split, and its prediction for each sample.

    Attributes:
        metrics: name -> value.
        records: one per sample.
        about: further entries of ``results.json``, such as the signatures of scores.
    """

    metrics: dict[str, float]
    records: Iterator[dict[str, Any]]
    about: Mapping[str, Any] = field(default_factory=dict)


class Task(Protocol):
    """What the loop asks of a task. All of it is a pure function of recipe and arguments."""

    Recipe: ClassVar[type[Recipe]]
    higher_is_better: ClassVar[Mapping[str, bool]]  # the metrics a model can be selected by
    provides: ClassVar[frozenset[str]]
    """What methods may need: "one_target_per_sample" (a sentence has many), "peers" (samples of the
    same class), "class_table" (few enough classes for a K x K table), "vocabulary_groups"."""
    method_defaults: ClassVar[Mapping[str, Mapping[str, Any]]]
    """Method -> hyper-parameter -> default, where it differs from that of the loss."""

    size: int  # samples of the training split
    num_classes: int
    steps_per_epoch: int
    fingerprint: str  # names exactly this data
    notes: Sequence[str]  # what a person should know of it

    def __init__(self, recipe: Any) -> None: ...

    def build_model(self) -> nn.Module:
        """A fresh model, from PyTorch's generator."""

    def facts(self) -> dict[str, Any]:
        """What a saved model says of itself: ``task``, ``num_classes``, what else is of use."""

    def model_files(
        self, model: nn.Module, weights: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What a run saves of a model with these weights: tensors, and texts by file name.

        Among the texts is ``config.json``, which has the facts, or has them under "labo".
        """

    @staticmethod
    def load_model(folder: Path) -> nn.Module:
        """A saved model, on the CPU."""

    def global_batch(self, epoch: int, position: int) -> Tensor:
        """The samples of a batch over all processes, (N,)."""

    def count(self, index: Tensor) -> int:
        """How many targets these samples have: what the mean loss divides by."""

    def batch(self, index: Tensor, epoch: int) -> Batch:
        """Samples as they look in this epoch."""

    def peers(self, batch: Batch) -> Batch:
        """For each sample of a batch another one of the same class."""

    def outputs(self, model: nn.Module, batch: Batch) -> Any:
        """Run the model: logits, or hidden states with the output layer."""

    def loss(self, loss: nn.Module, outputs: Any, batch: Batch, second: tuple[Any, ...]) -> Tensor:
        """The loss of outputs; ``second`` has the teacher's, if there is one."""

    def sums(self, outputs: Any, batch: Batch) -> Tensor:
        """(N,) one number per sample, finite where its outputs are."""

    def validate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """The scores on the validation split that a run follows; shared among the processes."""

    def evaluate(
        self,
        model: nn.Module,
        split: str,
        accelerator: Accelerator,
        *,
        beams: Sequence[int] = (),
    ) -> Evaluation:
        """All scores in eval mode on "valid" or "test", shared among the processes.

        Args:
            model: what to score.
            split: on what.
            accelerator: where.
            beams: for translation, further beam sizes to measure the length of the output at.
        """

    def examples(self, model: nn.Module, split: str, accelerator: Accelerator) -> dict[str, Any]:
        """A few samples with all their logits, to look at closely; and the names of the classes."""


def find_task(name: str) -> type[Task]:
    """The class of a task of ``TASKS``."""
    module, _, attribute = TASKS[name].partition(":")
    task: type[Task] = getattr(importlib.import_module(module), attribute)
    return task


def load_model(run: RunDirectory) -> nn.Module:
    """The selected model of a run, on the CPU."""
    facts = run.facts()
    run.must_have(run.best / "model.safetensors")
    try:
        return find_task(facts["task"]).load_model(run.best)
    except (KeyError, RuntimeError) as error:
        raise RequestError(f"{run.best} holds no model this version can build") from error


def find_model(run: str | Path, task: str) -> tuple[Path, dict[str, Any]]:
    """The model folder of a run, and the facts in it.

    Args:
        run: a run directory, or a model folder itself.
        task: the task that it must be a model for.

    Raises:
        RequestError: there is none, or it is for another task.
    """
    run = Path(run)
    found = [folder for folder in (run / "best", run) if (folder / "config.json").is_file()]
    if not found:
        raise RequestError(f"{run} is no run with best/config.json")
    path = found[0] / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        facts: dict[str, Any] = config.get("labo", config)
        theirs = facts.get("task")
    except (OSError, ValueError, AttributeError) as error:
        raise RequestError(f"{path} describes no model") from error
    if theirs != task:
        what = "no model of labo" if theirs is None else f"a model for {theirs}"
        raise RequestError(f"{run} holds {what}: this command takes a run of the task {task}")
    return found[0], facts
