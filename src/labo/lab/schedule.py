"""The steps of a run: the batches they use, and what is due after each of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from accelerate import Accelerator
from torch import Tensor

from .config import Train
from .run.checkpoint import Counters
from .tasks import Batch, Task

T = TypeVar("T")


@dataclass(frozen=True)
class Schedule:
    """The steps of a run. A step is an update; a batch is used for one or several in a row."""

    train: Train
    batches_per_epoch: int
    updates_per_batch: int = 1

    @property
    def steps_per_epoch(self) -> int:
        return self.batches_per_epoch * self.updates_per_batch

    @property
    def total(self) -> int:
        """The steps of the whole run."""
        epochs = self.train.epochs
        limits = (self.train.max_steps, epochs and epochs * self.steps_per_epoch)
        return min(limit for limit in limits if limit)

    @property
    def evaluation_steps(self) -> int:
        """Steps between two evaluations."""
        return self.train.eval_every_steps or self.train.eval_every * self.steps_per_epoch

    def epoch_of(self, step: int) -> int:
        """The epoch of a step; both count from 1."""
        return (step - 1) // self.steps_per_epoch + 1

    def is_evaluated(self, step: int) -> bool:
        return step > 0 and (step == self.total or step % self.evaluation_steps == 0)

    def is_logged(self, step: int) -> bool:
        return self.is_evaluated(step) or step % self.train.log_every == 0

    def is_between_batches(self, step: int) -> bool:
        return step % self.updates_per_batch == 0

    def is_saved(self, step: int) -> bool:
        """Whether there is a checkpoint. One that is due within a batch comes at its end."""
        if step == self.total or not self.is_between_batches(step):
            return step == self.total
        every = self.train.save_every
        updates = range(step - self.updates_per_batch + 1, step + 1)
        return any(self.is_evaluated(n) or (every and n % every == 0) for n in updates)

    def is_averaged(self, step: int) -> bool:
        """Whether an evaluated step is one of the last ``average_last``."""
        every = self.evaluation_steps
        to_come = 0 if step == self.total else (self.total - 1) // every - step // every + 1
        return to_come < self.train.average_last

    def batches(
        self, task: Task, done: Counters, accelerator: Accelerator
    ) -> Iterator[tuple[list[Batch], Tensor]]:
        """For each step to come this process's micro-batches, and the samples of all processes."""
        step, epoch, position = done.step, done.epoch, done.position
        while step < self.total:
            samples = task.global_batch(epoch, position)
            parts = samples.tensor_split(min(self.train.accumulate, len(samples)))
            batch = [_share(task, part, epoch, accelerator) for part in parts], samples
            for _ in range(min(self.updates_per_batch, self.total - step)):
                yield batch
            step += self.updates_per_batch
            position += 1
            if position == self.batches_per_epoch:
                epoch, position = epoch + 1, 0


def _share(task: Task, samples: Tensor, epoch: int, accelerator: Accelerator) -> Batch:
    """This process's samples of a micro-batch.

    All processes must take part in every step. One that has no sample takes one whose loss is
    ignored.
    """
    mine = samples.tensor_split(accelerator.num_processes)[accelerator.process_index]
    batch = task.batch(mine, epoch) if len(mine) else task.batch(samples[:1], epoch)
    batch = batch if len(mine) else batch.without_targets()
    return batch.pinned() if accelerator.device.type == "cuda" else batch


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items; up to four of them are made by a thread while others are in use."""
    with ThreadPoolExecutor(1) as worker:
        coming = deque(worker.submit(next, items, None) for _ in range(4))
        try:
            while (item := coming.popleft().result()) is not None:
                coming.append(worker.submit(next, items, None))
                yield item
        finally:
            worker.shutdown(wait=False, cancel_futures=True)
