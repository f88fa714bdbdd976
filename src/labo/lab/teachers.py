"""Teachers: the source of a second prediction, for methods that need one.

A teacher is a frozen model, a sample of the same class, an averaged model, or the model of the
previous epoch. The training loop calls it once per micro-batch, after the forward pass of the
model, and passes what it returns to the loss after ``(outputs, target)``. ``step()`` is called
after each optimizer step. The state of a teacher consists of tensors and is saved with every
checkpoint.

As with losses, the run supplies the positional parameters (``task``, ``model``, ``accelerator``,
``seed``). The keyword-only parameters are hyper-parameters.
"""

from __future__ import annotations

import copy
from typing import Annotated, Any

import torch
from accelerate import Accelerator
from pydantic import Field
from torch import Tensor, nn

from .errors import RequestError
from .run.directory import RunDirectory
from .run.distributed import gather_rows, is_synchronized, synchronize_batchnorm
from .run.seeds import mix, uniforms
from .tasks import Batch, Task, load_model


class Teacher:
    """No teacher, and the base class of all teachers."""

    def __call__(self, batch: Batch, outputs: Any) -> tuple[Any, ...]:
        """Further arguments of the loss, given the outputs of the model for ``batch``."""
        return ()

    def step(self) -> None:
        """Called after each optimizer step."""

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the state of ``state_dict()``."""


class Frozen(Teacher):
    """The selected model of a finished run, in eval mode (KD, Tf-KD_self).

    Args:
        teacher: directory of a finished run.
    """

    def __init__(self, task: Task, accelerator: Accelerator, *, teacher: str) -> None:
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
        self.model = model.to(accelerator.device).eval()

    @torch.no_grad()
    def __call__(self, batch: Batch, outputs: Any) -> tuple[Any]:
        with self.accelerator.autocast():
            return (self.task.outputs(self.model, batch),)


class Stored(Teacher):
    """The most probable classes of a teacher for every target, from files (top-k KD).

    Args:
        stored: the folder that ``labo teacher`` made.
    """

    def __init__(self, task: Task, accelerator: Accelerator, *, stored: str) -> None:
        self.read, self.device = task.stored_teacher(stored), accelerator.device

    def __call__(self, batch: Batch, outputs: Any) -> tuple[Any]:
        return (tuple(column.to(self.device) for column in self.read(batch)),)


class SameClassPeer(Teacher):
    """The model's own output for another sample of the same class (CS-KD).

    As in the authors' code the peers form a batch of their own, in train mode. Batch norm
    normalizes them separately and updates its running statistics twice per step.
    """

    def __init__(self, task: Task, model: nn.Module, accelerator: Accelerator) -> None:
        self.task, self.model, self.accelerator = task, model, accelerator

    @torch.no_grad()
    def __call__(self, batch: Batch, outputs: Tensor) -> tuple[Tensor]:
        peers = self.task.peers(batch).to(self.accelerator.device)
        with self.accelerator.autocast():
            return (self.task.outputs(self.model, peers),)


class EMA(Teacher):
    """An averaged model that ranks the samples, and the random draws (Beta-LS).

    As in the authors' code the average starts from its own initialization, is a plain mean of the
    weights at first (decay 1 - 1/(t+1) after step t, until ``decay`` is reached), does not average
    buffers, and runs in train mode. The i-th smallest draw from Beta(a, 1) goes to the i-th
    smallest confidence. Each micro-batch is ranked over all processes.

    Args:
        a: first parameter of the Beta distribution.
        decay: largest decay of the averaged weights.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        accelerator: Accelerator,
        seed: int,
        *,
        a: Annotated[float, Field(gt=0)] = 3.0,
        decay: Annotated[float, Field(ge=0, lt=1)] = 0.999,
    ) -> None:
        self.task, self.source, self.accelerator = task, model, accelerator
        self.a, self.decay = a, decay
        self.seed = seed
        torch.manual_seed(mix(seed, "averaged model"))
        average = task.build_model()
        if is_synchronized(model):
            average = synchronize_batchnorm(average, accelerator.device)
        self.average = average.to(accelerator.device).train().requires_grad_(False)
        self.steps = 0

    @torch.no_grad()
    def __call__(self, batch: Batch, outputs: Tensor) -> tuple[Tensor, Tensor]:
        with self.accelerator.autocast():
            average_logits = self.task.outputs(self.average, batch)
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
        for mean, new in zip(self.average.parameters(), self.source.parameters(), strict=True):
            mean.lerp_(new.detach(), 1 - decay)

    def state_dict(self) -> dict[str, Tensor]:
        return {**self.average.state_dict(), "teacher.steps": torch.tensor(self.steps)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.steps = int(state.pop("teacher.steps"))
        self.average.load_state_dict(state)


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


class PastWeights(Teacher):
    """The model at the end of the previous epoch (PS-KD with many targets per sample).

    A table of predictions would have samples x length x vocabulary entries, so the weights are
    kept instead and run in eval mode. In the first epoch the loss is plain cross entropy.
    """

    def __init__(self, task: Task, model: nn.Module, accelerator: Accelerator) -> None:
        self.task, self.source, self.accelerator = task, model, accelerator
        self.past = copy.deepcopy(model).eval().requires_grad_(False)
        self.steps = 0

    @torch.no_grad()
    def __call__(self, batch: Batch, outputs: Any) -> tuple[Any, ...]:
        if self.steps < self.task.steps_per_epoch:
            return ()
        with self.accelerator.autocast():
            return (self.task.outputs(self.past, batch),)

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        if self.steps % self.task.steps_per_epoch == 0:
            self.past.load_state_dict(self.source.state_dict())

    def state_dict(self) -> dict[str, Tensor]:
        return {**self.past.state_dict(), "teacher.steps": torch.tensor(self.steps)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.steps = int(state.pop("teacher.steps"))
        self.past.load_state_dict(state)


def past_self(task: Task, model: nn.Module, accelerator: Accelerator) -> Teacher:
    """The predictions of the previous epoch: a table, or the weights for many targets (PS-KD)."""
    if "one_target_per_sample" in task.provides:
        return PastPredictions(task, accelerator)
    return PastWeights(task, model, accelerator)
