"""Teachers: the source of a second prediction, for methods that need one.

A teacher is a frozen model, a sample of the same class, an averaged model, the model of the
previous epoch, or a second pass of the model itself. The training loop runs the model through
``run``, once per micro-batch, and passes the further outputs to the loss after
``(outputs, target)``. ``step()`` is called after each optimizer step. The state of a teacher
consists of tensors and is saved with every checkpoint.

As with losses, the run supplies the positional parameters (``task``, ``model``, ``accelerator``,
``parallel``, ``seed``). The keyword-only parameters are hyper-parameters. When a teacher is built,
the model is still on the CPU and whole. Models of its own are given to ``parallel.place``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from pydantic import Field
from torch import Tensor, nn

from .errors import RequestError
from .run.directory import RunDirectory
from .run.distributed import gather_rows, is_synchronized, synchronize_batchnorm
from .run.seeds import mix, uniforms
from .run.sharding import DataParallel
from .tasks import Batch, Task, load_model


class Teacher:
    """No teacher, and the base class of all teachers."""

    notes: Sequence[str] = ()  # what the user should know before the run begins
    fingerprint = ""  # names exactly what the teacher was read from; empty if nothing was read

    def run(self, task: Task, model: nn.Module, batch: Batch) -> tuple[Any, tuple[Any, ...]]:
        """The outputs of the model for ``batch``, and further ones that have a gradient too."""
        return task.outputs(model, batch), ()

    def __call__(self, batch: Batch, outputs: Any) -> tuple[Any, ...]:
        """Further arguments of the loss without a gradient, given the outputs of the model."""
        return ()

    def step(self) -> None:
        """Called after each optimizer step."""

    def state_dict(self) -> dict[str, Tensor]:
        """The state of all processes together. All of them call it."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the state of ``state_dict()``."""


class ModelTeacher(Teacher):
    """The base class of teachers whose second prediction is that of a model."""

    task: Task
    accelerator: Accelerator
    model: nn.Module

    @torch.no_grad()
    def predict(self, batch: Batch) -> Any:
        with self.accelerator.autocast():
            return self.task.outputs(self.model, batch)


class Frozen(ModelTeacher):
    """The selected model of a finished run, in eval mode (KD, Tf-KD_self)."""

    def __init__(
        self,
        task: Task,
        accelerator: Accelerator,
        parallel: DataParallel,
        *,
        teacher: Annotated[str, Field(description="directory of a finished run.")],
    ) -> None:
        self.task, self.accelerator = task, accelerator
        model = load_model(RunDirectory(teacher))
        theirs, ours = RunDirectory(teacher).facts(), task.facts()
        if theirs["num_classes"] != ours["num_classes"]:
            raise RequestError(
                f"method.teacher: {teacher} has {theirs['num_classes']} classes, "
                f"the data has {ours['num_classes']}"
            )
        if theirs.get("vocabulary") != ours.get("vocabulary"):
            raise RequestError(
                f"method.teacher: {teacher} was trained with a different target vocabulary"
            )
        self.model = parallel.place(model.requires_grad_(False)).eval()
        self.fingerprint = f"{Path(teacher).name}@{str(RunDirectory(teacher).model)[:12]}"

    def __call__(self, batch: Batch, outputs: Any) -> tuple[Any]:
        return (self.predict(batch),)


class Stored(Teacher):
    """The most probable classes of a teacher for every target, from files (top-k KD)."""

    def __init__(
        self,
        task: Task,
        accelerator: Accelerator,
        *,
        stored: Annotated[str, Field(description="the folder that `labo teacher` made.")],
    ) -> None:
        (content, self.read), self.device = task.stored_teacher(stored), accelerator.device
        self.fingerprint = f"{Path(stored).name}@{content}"

    def __call__(self, batch: Batch, outputs: Any) -> tuple[Any]:
        return (tuple(column.to(self.device) for column in self.read(batch)),)


class SameClassPeer(ModelTeacher):
    """The model's own output for another sample of the same class (CS-KD).

    As in the authors' code the peers form a batch of their own, in train mode. Batch norm
    normalizes them separately and updates its running statistics twice per step.
    """

    def __init__(self, task: Task, model: nn.Module, accelerator: Accelerator) -> None:
        self.task, self.model, self.accelerator = task, model, accelerator

    def __call__(self, batch: Batch, outputs: Tensor) -> tuple[Tensor]:
        return (self.predict(self.task.peers(batch).to(self.accelerator.device)),)


class SecondPass(Teacher):
    """The model's output for the same samples with other dropout, with a gradient (R-Drop).

    As in the authors' translation code the batch is doubled and takes one forward pass. Batch norm
    then normalizes both copies by the statistics of all samples and moves its running statistics
    once per step, as for the other methods. Two passes would move them twice.
    """

    def __init__(self, model: nn.Module) -> None:
        if not has_dropout(model):
            self.notes = [
                "the model has no dropout, so that its two passes agree: r-drop is the cross "
                "entropy of its label"
            ]

    def run(self, task: Task, model: nn.Module, batch: Batch) -> tuple[Any, tuple[Any, ...]]:
        first, second = task.outputs(model, batch.twice()).chunk(2)
        return first, (second,)


def has_dropout(model: nn.Module) -> bool:
    """Whether a model drops anything at random in training: units, or layers by a hook."""
    for part in model.modules():
        for holder in (part, *part._forward_hooks.values()):
            drops = "drop" in type(holder).__name__.lower()
            for name, value in vars(holder).items():
                if isinstance(value, float) and value > 0 and (drops or "drop" in name):
                    return True
    return False


class OwnModel(ModelTeacher):
    """The base class of teachers with a model of their own that changes with the steps."""

    steps = 0

    def state_dict(self) -> dict[str, Tensor]:
        return {**self.model.state_dict(), "teacher.steps": torch.tensor(self.steps)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.steps = int(state.pop("teacher.steps"))
        self.model.load_state_dict(state)


class EMA(OwnModel):
    """An averaged model that ranks the samples, and the random draws (Beta-LS).

    As in the authors' code the average starts from its own initialization, is a plain mean of the
    weights at first (decay 1 - 1/(t+1) after step t, until ``decay`` is reached), does not average
    buffers, and runs in train mode. The i-th smallest draw from Beta(a, 1) goes to the i-th
    smallest confidence. Each micro-batch is ranked over all processes.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        accelerator: Accelerator,
        parallel: DataParallel,
        seed: int,
        *,
        a: float,
        decay: Annotated[
            float, Field(ge=0, lt=1, description="largest decay of the averaged weights.")
        ] = 0.999,
    ) -> None:
        self.task, self.source, self.accelerator = task, model, accelerator
        self.a, self.decay, self.seed = a, decay, seed
        torch.manual_seed(mix(seed, "averaged model"))
        average = task.build_model()
        if is_synchronized(model):
            average = synchronize_batchnorm(average, accelerator.device)
        self.model = parallel.place(average.requires_grad_(False)).train()

    @torch.no_grad()
    def __call__(self, batch: Batch, outputs: Tensor) -> tuple[Tensor, Tensor]:
        average_logits = self.predict(batch)
        u = uniforms(self.seed, batch.epoch, batch.index, 1, stream="beta").squeeze(-1)
        draws = u.to(outputs.device) ** (1 / self.a)
        counts = batch.target >= 0
        label = batch.target.clamp(min=0).unsqueeze(-1)
        confidence = average_logits.float().softmax(-1).gather(-1, label).squeeze(-1)
        return average_logits, self._own_share(confidence, draws, counts)

    def _own_share(self, confidence: Tensor, draws: Tensor, counts: Tensor) -> Tensor:
        """The draws of this process, after those of all processes are assigned by confidence.

        The loss ranks the rows of its process again, so only the set of draws matters.
        """
        if self.accelerator.num_processes == 1:
            return draws
        owner = torch.full_like(draws, self.accelerator.process_index)
        rows = torch.stack([confidence, draws, owner], 1)[counts]
        all_rows = gather_rows(self.accelerator, rows)
        by_confidence = all_rows[:, 0].argsort(stable=True)
        mine = all_rows[by_confidence, 2] == self.accelerator.process_index
        share = draws.clone()
        share[counts] = all_rows[:, 1].sort().values[mine]
        return share

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        decay = min(1 - 1 / (self.steps + 1), self.decay)
        # The state of a model has its own shares of split parameters, also after it was run.
        average, source = self.model.state_dict(), self.source.state_dict()
        for name, _ in self.source.named_parameters():
            average[name].lerp_(source[name], 1 - decay)


class PastPredictions(Teacher):
    """The prediction for each sample in the previous epoch (PS-KD).

    A table of log-probabilities (samples x classes), on the CPU of every process. A row is written
    after the optimizer step and holds the prediction from before it. In the first epoch, and for
    samples not seen yet, the label itself takes its place, and the loss is plain cross entropy.
    """

    def __init__(self, task: Task, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.table = torch.zeros(task.size, task.num_classes)
        self.seen = torch.zeros(task.size, dtype=torch.bool)
        self.pending: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def __call__(self, batch: Batch, outputs: Tensor) -> tuple[Tensor]:
        counts = batch.target >= 0
        log_p = outputs.detach().float().log_softmax(-1)
        self.pending.append((batch.index[counts.cpu()], log_p[counts]))
        label = torch.zeros_like(outputs, dtype=torch.float32)
        label.scatter_(-1, batch.target.clamp(min=0).unsqueeze(-1), 1.0)
        past = self.table[batch.index].to(outputs.device)
        seen = self.seen[batch.index].to(outputs.device)
        return (torch.where(seen.unsqueeze(-1), past, label.log()),)

    def step(self) -> None:
        index = torch.cat([index for index, _ in self.pending])
        log_p = torch.cat([log_p for _, log_p in self.pending])
        self.pending.clear()
        index = gather_rows(self.accelerator, index).cpu()
        self.table[index] = gather_rows(self.accelerator, log_p).cpu()
        self.seen[index] = True

    def state_dict(self) -> dict[str, Tensor]:
        return {"table": self.table, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.table.copy_(state["table"])
        self.seen.copy_(state["seen"])


class PastWeights(OwnModel):
    """The model at the end of the previous epoch (PS-KD with many targets per sample).

    A table of predictions would have samples x length x vocabulary entries, so the weights are
    kept instead and run in eval mode. In the first epoch the loss is plain cross entropy.
    """

    def __init__(
        self, task: Task, model: nn.Module, accelerator: Accelerator, parallel: DataParallel
    ) -> None:
        self.task, self.source, self.accelerator = task, model, accelerator
        self.model = parallel.place(copy.deepcopy(model).requires_grad_(False)).eval()

    def __call__(self, batch: Batch, outputs: Any) -> tuple[Any, ...]:
        return () if self.steps < self.task.steps_per_epoch else (self.predict(batch),)

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        if self.steps % self.task.steps_per_epoch == 0:
            self.model.load_state_dict(self.source.state_dict())


class InnerStates(Teacher):
    """Hidden states from inside the model, with a gradient, and random draws (ConNet).

    The draws are functions of the sample and the position, not of what was drawn before.
    """

    def __init__(
        self,
        *,
        layers: Annotated[
            int,
            Field(
                ge=1,
                description="decoder layers whose outputs are averaged, from the first one on.",
            ),
        ] = 3,
    ) -> None:
        self.layers = layers

    def run(self, task: Task, model: nn.Module, batch: Batch) -> tuple[Any, tuple[Any, ...]]:
        outputs = task.outputs(model, batch, inner_layers=self.layers)
        return outputs, (None, task.token_draws(batch, "trust"))


class EpochStart(PastWeights):
    """The model at the start of the epoch, in eval mode (LABO with ``refresh=epoch``).

    In the first epoch it is the model before any training.
    """

    def __call__(self, batch: Batch, outputs: Any) -> tuple[Any]:
        return (self.predict(batch),)

    def step(self) -> None:
        super().step()
        if self.steps % self.task.steps_per_epoch == 0:
            for buffer in self.model.buffers():  # running statistics: those of the first process
                broadcast(buffer)


class HeldOutputs(Teacher):
    """The outputs of the first update on a batch, for the later ones (LABO's outer loop).

    Logits are kept as they are. Hidden states are kept with a copy of the output layer, which the
    updates change. Nothing is held between two batches, where checkpoints are saved.
    """

    def __init__(self, task: Task, updates: int) -> None:
        self.updates = updates
        self.notes = [
            f"each batch is used for {updates} updates in a row, and an epoch has "
            f"{updates * task.steps_per_epoch:,} steps; to compare methods after equal numbers of "
            "updates, set train.max_steps"
        ]
        self.done = 0  # updates on the current batch
        self.held: list[Any] = []  # the outputs for each micro-batch
        self.number = 0  # of the next micro-batch

    def __call__(self, batch: Batch, outputs: Any) -> tuple[Any, ...]:
        self.number += 1
        if self.done == 0:
            self.held.append(self._copied(outputs))
            return ()
        return (self.held[self.number - 1],)

    def _copied(self, outputs: Any) -> Any:
        """Outputs without a gradient. The copy of the output layer is one for all micro-batches."""
        if isinstance(outputs, Tensor):
            return outputs.detach()
        rows, *layer = outputs
        if self.held:
            layer = self.held[0][1:]
        else:
            layer = [x.detach().clone() if isinstance(x, Tensor) else x for x in layer]
        return type(outputs)(rows.detach(), *layer)

    def step(self) -> None:
        self.done, self.number = (self.done + 1) % self.updates, 0
        if self.done == 0:
            self.held.clear()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if state.get("done"):
            raise ValueError("an earlier version saved it between two updates on one batch")


def held_label(
    task: Task,
    model: nn.Module,
    accelerator: Accelerator,
    parallel: DataParallel,
    *,
    outer_steps: Annotated[
        int,
        Field(
            ge=1,
            description="M, updates on each batch. The smoothing distribution and alpha are those "
            "of the first; 1 is the paper's algorithm.",
        ),
    ] = 1,
    refresh: Annotated[
        Literal["step", "epoch"],
        Field(
            description='"step", or "epoch" to take them from the model at the start of the epoch, '
            "in eval mode.",
        ),
    ] = "step",
) -> Teacher:
    """Where the optimal smoothing of LABO comes from."""
    if refresh == "epoch":
        if outer_steps > 1:
            raise RequestError(
                "method.outer_steps: with refresh=epoch the label is held for the whole epoch; "
                "leave outer_steps at 1"
            )
        return EpochStart(task, model, accelerator, parallel)
    return Teacher() if outer_steps == 1 else HeldOutputs(task, outer_steps)


def past_self(
    task: Task, model: nn.Module, accelerator: Accelerator, parallel: DataParallel
) -> Teacher:
    """The predictions of the previous epoch: a table, or the weights for many targets (PS-KD)."""
    if "one_target_per_sample" in task.provides:
        return PastPredictions(task, accelerator)
    return PastWeights(task, model, accelerator, parallel)
