"""The protocol of a task: its data, its model, its loss and its scores.

``TASKS`` names the package of each task. A package has

- ``task.py`` with the class of the task, named ``TASK``: what training and evaluation need;
- ``analysis.py`` with a :class:`labo.lab.analysis.task.TaskAnalysis`, named ``ANALYSIS``: what
  compare, analyze and report need, without torch;
- perhaps ``report.py`` with a :class:`labo.lab.report.task.TaskReport`, named ``REPORT``: what the
  report shows besides what it shows for every task;
- perhaps ``teacher.py`` with a :class:`labo.lab.text.teacher.TrainingPredictions`, named
  ``PREDICTIONS``: what ``labo teacher`` stores.

They are imported when they are first needed, so importing this module needs neither torch nor
accelerate. No module outside of a task's package depends on which task it is.
``docs/add_a_task.md`` adds one.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from .._names import unknown_name
from .config import Recipe
from .errors import RequestError
from .run.checksums import verify_folder
from .run.directory import RunDirectory
from .run.files import Document, read_json

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch import Tensor, nn

TASKS = {
    "image_classification": "labo.lab.images",
    "translation": "labo.lab.translation",
    "language_modeling": "labo.lab.language_modeling",
}


@dataclass(frozen=True)
class Batch:
    """Samples of the training split as the model takes them.

    Attributes:
        inputs: what the model reads, or what ``to(device)`` makes it of on the device.
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

    def pinned(self) -> Batch:
        """The same, with inputs in pinned memory if they can be: copies to a GPU do not wait."""
        pin = getattr(self.inputs, "pin_memory", None)
        return self if pin is None else replace(self, inputs=pin())

    def without_targets(self) -> Batch:
        """The same inputs, with every target ignored."""
        soft = self.target.is_floating_point()
        target = self.target.new_full(self.target.shape[: 1 if soft else None], -100)
        return replace(self, target=target.long())

    def twice(self) -> Batch:
        """Every sample once more, after all of them."""
        return replace(
            self,
            inputs=_twice(self.inputs),
            target=_twice(self.target),
            index=_twice(self.index),
        )


def _twice(inputs: Any) -> Any:
    """A tensor (N, ...) or a dataclass of such tensors, repeated."""
    if is_dataclass(inputs):
        parts = {part.name: _twice(getattr(inputs, part.name)) for part in fields(inputs)}
        return replace(inputs, **parts)  # type: ignore[type-var]
    return None if inputs is None else inputs.repeat(2, *(1,) * (inputs.dim() - 1))


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
    """What training and evaluation need of a task.

    Every method is a pure function of the recipe and its arguments. A class that inherits from this
    one gets the methods that have a body; the others it must define.
    """

    Recipe: ClassVar[type[Recipe]]
    higher_is_better: ClassVar[Mapping[str, bool]]  # the metrics a model can be selected by
    provides: ClassVar[frozenset[str]] = frozenset()
    """What methods may need: "one_target_per_sample" (a sentence has many), "peers" (samples of the
    same class), "class_table" (few enough classes for a K x K table), "vocabulary_groups",
    "stored_teacher", "inner_states" (hidden states from inside the model, and
    :meth:`token_draws`)."""
    method_defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Method -> hyper-parameter -> default, where it differs from that of the loss."""

    shardable: ClassVar[bool] = False
    """Whether the model may be split over processes (``train.parallel=fsdp``). Validation and
    evaluation must then run the model equally often on every process, by calling it as a whole; see
    :func:`labo.lab.run.distributed.in_step`."""

    tempered_records: ClassVar[bool] = False
    """Whether the records must hold what a temperature makes of the probabilities: true if they do
    not have the probabilities of all classes, from which the analysis computes it."""

    recipe: Any
    size: int  # samples of the training split
    num_classes: int
    steps_per_epoch: int
    fingerprint: str  # names exactly this data
    notes: Sequence[str] = ()  # printed when training starts

    def __init__(self, recipe: Any) -> None: ...

    # ------------------------------------------------------------------ the model

    def build_model(self) -> nn.Module:
        """A new model, with weights from PyTorch's random generator."""

    def facts(self) -> dict[str, Any]:
        """What is saved with a model: ``task``, ``num_classes``, and what loading it needs."""

    def model_files(
        self, model: nn.Module, weights: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, str | bytes]]:
        """What a run saves of a model with these weights: tensors, and further files by name.

        One of the files is ``config.json``. It has the facts, at the top or under "labo".
        """
        return dict(weights), {"config.json": json.dumps(self.facts(), indent=2) + "\n"}

    @staticmethod
    def load_model(folder: Path) -> nn.Module:
        """A saved model, on the CPU."""

    # ------------------------------------------------------------------ training

    def global_batch(self, epoch: int, position: int) -> Tensor:
        """(N,) the indices of the samples of a batch, over all processes.

        By default every sample once per epoch, in a new random order, ``train.batch_size`` at a
        time.
        """
        from .run.seeds import permutation

        size = self.recipe.train.batch_size
        order = permutation(self.recipe.seed, epoch, self.size)
        return order[position * size : (position + 1) * size]

    def count(self, index: Tensor, epoch: int) -> int:
        """How many targets these samples have: the divisor of the mean loss."""
        return len(index)

    def batch(self, index: Tensor, epoch: int) -> Batch:
        """Samples as they are in this epoch, with augmentation if there is any."""

    def peers(self, batch: Batch) -> Batch:
        """For each sample of a batch another one of the same class."""
        raise RequestError(f"{self.recipe.task} does not provide peers")

    def stored_teacher(self, folder: str) -> tuple[str, Callable[[Batch], tuple[Tensor, Tensor]]]:
        """Predictions that ``labo teacher`` stored: their name, and a function of a training batch.

        The name is the same for the same content. The function returns indices and
        log-probabilities, each (n, k), of the n targets of the batch.
        """
        raise RequestError(f"{self.recipe.task} does not provide stored_teacher")

    def outputs(self, model: nn.Module, batch: Batch, **options: Any) -> Any:
        """Run the model: logits, or a NamedTuple of hidden states and their output layer.

        They have ``chunk(2)``, as tensors do: the outputs for the two halves of the samples. A task
        that provides "inner_states" takes the option ``inner_layers``.
        """
        return model(batch.inputs, **options)

    def token_draws(self, batch: Batch, stream: str) -> Tensor:
        """A random number in [0, 1) for each row of the outputs for a batch."""
        raise RequestError(f"{self.recipe.task} does not provide inner_states")

    def loss(
        self, loss: nn.Module, outputs: Any, batch: Batch, teacher_outputs: tuple[Any, ...]
    ) -> Tensor:
        """The loss of outputs; ``teacher_outputs`` is empty if the method has no teacher."""
        value: Tensor = loss(outputs, batch.target, *teacher_outputs)
        return value

    def sums(self, outputs: Any, batch: Batch) -> Tensor:
        """(N,) one number per sample that is finite if and only if all its outputs are."""
        total: Tensor = outputs.detach().flatten(1).sum(-1)
        return total

    # ------------------------------------------------------------------ evaluation

    def scored_by(self) -> dict[str, str]:
        """Score -> its signature, for scores that have one."""
        return {}

    def validate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """The scores on the validation split that are logged during training."""
        return self.evaluate(model, "valid", accelerator).metrics

    def logits(
        self, model: nn.Module, split: str, accelerator: Accelerator
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits (n, K) and targets (n,) of this process's share of a split, in eval mode.

        Every call gives the same batches.
        """
        raise RequestError(f"{self.recipe.task} has no logits to fit a temperature to")

    def fold_temperature(self, model: nn.Module, temperature: float) -> None:
        """Divide the output layer of a model by a temperature."""
        from ..calibration import fold_temperature

        fold_temperature(model, temperature)

    def evaluate(
        self,
        model: nn.Module,
        split: str,
        accelerator: Accelerator,
        **options: Any,
    ) -> Evaluation:
        """All scores in eval mode, computed by all processes together.

        Args:
            model: the model.
            split: "valid" or "test".
            accelerator: the devices and processes.
            **options: values of the task's ``evaluate_options``, see
                :class:`labo.lab.analysis.task.TaskAnalysis`; and, for a task with :meth:`logits`,
                ``temperature``: also measure softmax(logits / temperature).
        """

    def examples(
        self, model: nn.Module, split: str, accelerator: Accelerator
    ) -> dict[str, Any] | None:
        """A few samples with all their logits, for the label figures of the report.

        Returns:
            ``{"classes": [name], "examples": [{"title", "target", "logits", "image", "context"}]}``
            or None, the default.
        """
        return None


def task_package(name: str) -> str:
    """The package of a task of ``TASKS``."""
    if name not in TASKS:
        raise RequestError(unknown_name("task", name, TASKS))
    return TASKS[name]


def find_task(name: str) -> type[Task]:
    """The class of a task of ``TASKS``."""
    task: type[Task] = importlib.import_module(f"{task_package(name)}.task").TASK
    return task


def load_model(run: RunDirectory) -> nn.Module:
    """The selected model of a run, on the CPU; a RequestError if it is missing or damaged."""
    run.verify_best()
    facts = run.facts()
    try:
        return find_task(facts["task"]).load_model(run.best)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise RequestError(f"{run.best} holds no model that this version can build") from error


def find_model(run: str | Path, task: str, *, foreign: bool = False) -> tuple[Path, dict[str, Any]]:
    """The folder of a model for this task, and the facts in it.

    ``run`` is a run directory, or the model folder itself; ``foreign``: one that does not say which
    task it is for will do, as those of others do not.
    """
    folder = _model_folder(Path(run))
    verify_folder(folder)
    theirs, facts = _task_and_facts(folder)
    if theirs != task and not (foreign and theirs is None):
        kind = f"a model for {theirs}" if theirs is not None else "no model of labo"
        raise RequestError(f"{run} holds {kind}, not a model for {task}")
    return folder, facts


def task_of_model(run: str | Path) -> str:
    """The task of the model of a run."""
    task, _ = _task_and_facts(_model_folder(Path(run)))
    if task is None:
        raise RequestError(f"{run} holds no model of labo")
    return task


def _model_folder(run: Path) -> Path:
    best = RunDirectory(run).best
    if not (best / "config.json").is_file() and (run / "config.json").is_file():
        return run
    RunDirectory(run).must_have(best / "config.json")
    return best


def _task_and_facts(folder: Path) -> tuple[str | None, dict[str, Any]]:
    document = read_json(folder / "config.json", Document).model_dump()
    facts = document.get("labo", document)
    task = facts.get("task") if isinstance(facts, dict) else None
    return (task, facts) if isinstance(task, str) else (None, {})
