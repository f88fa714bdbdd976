"""The training loop, for every task and every method.

batch -> teacher -> loss -> backward -> check -> optimizer step -> evaluate -> save

No random state is kept between steps: the order of the samples, their augmentation, dropout and the
learning rate are functions of the seed, the epoch, the sample and the step. A checkpoint, written
between two optimizer steps, is therefore enough to continue a killed run bit for bit.

With several processes each takes its share of the same global batch, and the loss is divided by
the number of targets in the whole batch. The loss curve is then that of one process, up to
rounding, if the model has no batch norm or ``train.sync_batchnorm`` is on. Without it each process
normalises its own share of the batch.

A run may be continued by another number of processes: the samples and their order stay the same,
and the loss curve does up to rounding. The bits are those of an uninterrupted run only if the
number stays the same.

How the model is spread over the processes, whole on each or split, is the business of
:mod:`labo.lab.run.sharding`.

Ctrl-C and SIGTERM let the step under way finish, save a checkpoint and end the run.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, broadcast, broadcast_object_list
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from ..losses import Warmup
from .config import Recipe
from .errors import LabError, RequestError
from .methods import METHODS, updates_per_batch
from .optim import build_optimizer, learning_rate
from .run import checkpoint
from .run.checksums import DamagedError
from .run.directory import RunDirectory
from .run.distributed import (
    device_name,
    gather_rows,
    has_batchnorm,
    is_lost_process,
    make_accelerator,
    nothing_counted,
    on_cpu,
    synchronize_batchnorm,
)
from .run.interrupt import Interruptions
from .run.lock import held
from .run.progress import Display
from .run.seeds import mix
from .run.sharding import spread
from .run.trackers import installed_trackers, missing_tensorboard, start_trackers
from .tasks import Batch, Task, find_task, load_model

T = TypeVar("T")

_NAMED_SAMPLES = 16  # how many samples a message lists


class KeptModel(BaseModel):
    """An evaluated model whose weights are kept."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    step: int = Field(ge=1)
    score: float  # that which selects
    nll: float | None


class TrainingState(BaseModel):
    """Where a run is, apart from its tensors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    step: int = Field(0, ge=0)  # optimizer steps done
    epoch: int = Field(0, ge=0)  # epochs done
    position: int = Field(0, ge=0)  # batches done in this epoch
    loss_sum: float = 0.0  # since the last logged line
    loss_steps: int = Field(0, ge=0)
    evaluated: int = Field(0, ge=0)  # the step of the last evaluation
    best: float | None = None  # the score of the selected model
    best_nll: float | None = None  # its NLL, which decides between equal scores
    best_step: int = Field(0, ge=0)
    stale: int = Field(0, ge=0)  # evaluations since the score was last exceeded
    averaged: int = Field(0, ge=0)  # models in the average
    kept: list[KeptModel] = []  # in the order of their steps
    seconds: float = Field(0.0, ge=0)  # spent in training, over all its starts
    earlier_processes: list[int] = []  # how many there were, before their number changed
    devices: list[str] = []  # all that the first process has worked on


class SavedState(TrainingState):
    """The state in a checkpoint."""

    processes: int = Field(ge=1)
    scaler: dict[str, Any] | None = None  # of fp16


def train(
    recipe: Recipe, out: str | Path, *, test: bool = True, accept_data: bool = False
) -> dict[str, Any]:
    """Train, or continue training, in a run directory.

    Args:
        recipe: what to train.
        out: the run directory; made if it is missing.
        test: whether to score the selected model on the test split at the end. If not, that split
            is left to ``labo evaluate``, which adds its scores to the results.
        accept_data: continue the run although its data have changed.

    Returns:
        The content of ``results.json``.

    Raises:
        RequestError: the directory holds something else or is in use, the data have changed, or the
            recipe does not fit them.
        LabError: the work failed; the run can be continued from its last checkpoint.
    """
    run = RunDirectory(out)
    run.check(recipe)
    if run.finished:
        return run.results()
    trainer = Trainer(recipe, run, accept_data=accept_data)
    try:
        with owned(run, trainer.accelerator):
            run.check(recipe)  # again: another process may have been at work until now
            return run.results() if run.finished else trainer.train(test)
    except Exception as error:
        if trainer.accelerator.num_processes > 1 and is_lost_process(error):
            raise LabError(
                "another process of this run has ended (its own message is above, unless it was "
                "killed); the same command continues the run from its last checkpoint"
            ) from error
        raise


@contextmanager
def owned(run: RunDirectory, accelerator: Accelerator) -> Iterator[None]:
    """Own a run directory; its processes are one owner.

    Raises:
        RequestError: on every process, if another one owns it.
    """
    problem: list[Exception | None] = [None]
    with nullcontext() if not accelerator.is_main_process else _Lock(run, problem):
        broadcast_object_list(problem)
        if problem[0] is not None:
            raise problem[0]
        yield


class _Lock:
    """:func:`labo.lab.run.lock.held`, with a refusal put into a list instead of raised."""

    def __init__(self, run: RunDirectory, problem: list[Exception | None]) -> None:
        self.run, self.lock, self.problem = run, held(run.path), problem

    def __enter__(self) -> None:
        try:
            self.run.refuse_links()
            self.lock.__enter__()
        except LabError as error:
            self.problem[0] = error

    def __exit__(self, *details: Any) -> None:
        if self.problem[0] is None:
            self.lock.__exit__(*details)


class Trainer:
    """The parts of a run, and the loop over them."""

    def __init__(self, recipe: Recipe, run: RunDirectory, *, accept_data: bool = False) -> None:
        self.recipe, self.run, self.accept_data = recipe, run, accept_data
        self.accelerator = _accelerator(recipe, run)
        self.parallel = spread(recipe.train.parallel, self.accelerator)
        self.task = find_task(recipe.task)(recipe)
        if not accept_data:
            run.check_data(self.task.fingerprint)
        # A step is an update. An epoch uses every batch, for one or several updates in a row.
        self.updates_per_batch = updates_per_batch(recipe.method)
        steps = self.steps_per_epoch = self.task.steps_per_epoch * self.updates_per_batch
        limits = (recipe.train.max_steps, recipe.train.epochs and recipe.train.epochs * steps)
        self.total = min(limit for limit in limits if limit)

        torch.manual_seed(mix(recipe.seed, "model"))
        self.module = self.task.build_model()
        if recipe.train.sync_batchnorm and self.accelerator.num_processes > 1:
            self.module = synchronize_batchnorm(self.module, self.accelerator.device)
        facts = {
            "num_classes": self.task.num_classes,
            "epochs": -(-self.total // steps),
            "task": self.task,
            "model": self.module,
            "accelerator": self.accelerator,
            "parallel": self.parallel,
            "seed": recipe.seed,
        }
        method = METHODS[recipe.method["name"]]
        self.loss, self.teacher = method.build(recipe.method, facts)
        if not accept_data:
            run.check_teacher(self.teacher.fingerprint)
        self.loss.to(self.accelerator.device)
        self.parallel.place(self.module)
        self.model, self.optimizer = self.parallel.prepare(
            self.module, build_optimizer(recipe.optim, self.module, self.loss)
        )
        self.notes = list(self._notes())
        self.average: dict[str, Tensor] = {}
        self.ema: dict[str, Tensor] = {}  # the moving average of the weights, if there is one
        self.state = TrainingState()
        self.saved: Path | None = None  # the newest checkpoint
        self.saved_step = 0
        self.interruptions = Interruptions()
        self.stopping = False  # all processes have agreed to stop after this step
        self.between_steps = True  # the state is one that can be saved

    def train(self, test: bool) -> dict[str, Any]:
        """The loop; ``test`` says whether it ends on the test split."""
        if self.accelerator.is_main_process:
            self.run.start(self.recipe, self.task.fingerprint, self.teacher.fingerprint)
            if self.accept_data:
                self.run.accept_data(self.task.fingerprint, self.teacher.fingerprint)
        self.accelerator.wait_for_everyone()
        with (
            self.interruptions.handled(),
            Display(self.total, silent=not self.accelerator.is_main_process) as self.display,
        ):
            for line in self._header():
                self.display.say(line)
            for note in self.notes:
                self.display.say(f"note: {note}")
            missing = missing_tensorboard(self.recipe.train.log_with)
            if missing is not None:
                self.display.say(f"note: {missing}")
            self.restore()
            try:
                self._loop()
                return self.finish(test)
            except KeyboardInterrupt:
                self._save_interrupted()
                raise

    def _loop(self) -> None:
        state, began = self.state, time.perf_counter() - self.state.seconds
        if self._is_evaluated(state.step) and state.evaluated < state.step:
            self.evaluate()  # the run was interrupted before or while it did
            self.save()
        upcoming = self.upcoming()
        while (batch := self._next(upcoming)) is not None:
            batches, index = batch
            with self.interruptions.deferred():
                self.between_steps = False
                self.update(batches, index)
                state.step += 1
                if state.step % self.updates_per_batch == 0:
                    self._end_batch()
                state.seconds = time.perf_counter() - began
                self.between_steps = True
                self.display.advance(state.step, self.task.count(index, batches[0].epoch))
                evaluated = self._is_evaluated(state.step)
                if evaluated or state.step % self.recipe.train.log_every == 0:
                    self.log()
            self._stop_if_asked()
            if evaluated:
                self.evaluate()
                state.seconds = time.perf_counter() - began
            if evaluated or _divides(self.recipe.train.save_every, state.step):
                self.save()

    def _end_batch(self) -> None:
        """Go on to the next batch, after the last update on one."""
        state = self.state
        state.position += 1
        _tell(self.loss, "step")
        if state.position == self.task.steps_per_epoch:
            state.epoch, state.position = state.epoch + 1, 0
            _tell(self.loss, "end_epoch")

    def _next(self, upcoming: Iterator[T]) -> T | None:
        """The next item, or None. Several processes must agree before any of them may stop."""
        several = self.accelerator.num_processes > 1
        with self.interruptions.deferred() if several else nullcontext():
            return next(upcoming, None)

    @property
    def _evaluation_steps(self) -> int:
        """Steps between two evaluations."""
        train = self.recipe.train
        return train.eval_every_steps or train.eval_every * self.steps_per_epoch

    def _is_evaluated(self, step: int) -> bool:
        every = self._evaluation_steps
        return step > 0 and (step == self.total or step % every == 0)

    def _is_averaged(self, step: int) -> bool:
        """Whether an evaluated step is one of the last ``average_last``."""
        every = self._evaluation_steps
        to_come = 0 if step == self.total else (self.total - 1) // every - step // every + 1
        return to_come < self.recipe.train.average_last

    def _stop_if_asked(self) -> None:
        """End the run if a signal came during the step."""
        several = self.accelerator.num_processes > 1
        if self.stopping or (self.interruptions.requested and not several):
            raise KeyboardInterrupt

    def _save_interrupted(self) -> None:
        """Save a checkpoint, if the state is whole and every process is here to take part."""
        together = self.stopping or self.accelerator.num_processes == 1
        if together and self.between_steps and self.state.step > self.saved_step:
            self.save()

    def _header(self) -> Iterator[str]:
        """What is trained, on what and where: a line for each fact."""
        task, recipe, accelerator = self.task, self.recipe, self.accelerator
        yield (
            f"data       {task.fingerprint}: {task.size:,} training samples, "
            f"{task.num_classes:,} classes, {self.steps_per_epoch:,} steps per epoch"
        )
        trained = sum(p.numel() for p in self.module.parameters() if p.requires_grad)
        yield f"model      {trained:,} parameters"
        device = f"{accelerator.device.type}: {device_name(accelerator.device)}"
        several = f", {accelerator.num_processes} processes"
        several += " with a share of the model each" if recipe.train.parallel == "fsdp" else ""
        precision = {"no": "float32"}.get(recipe.train.precision, recipe.train.precision)
        yield (
            f"device     {device}{several if accelerator.num_processes > 1 else ''}, {precision}"
        )
        name, *hyper = (f"{key}={value}" for key, value in recipe.method.items())
        yield f"method     {name.removeprefix('name=')}{''.join(f' {text}' for text in hyper)}"
        selected = f"selected by {recipe.selected_by}, every {self._evaluation_steps:,} steps"
        yield f"length     {self.total:,} steps; {selected}"
        if recipe.train.ema is not None:
            yield f"average    moving average of the weights, decay {recipe.train.ema:g}"
        yield from (f"{name:<10} {text}" for name, text in task.scored_by().items())
        yield f"folder     {self.run.path}"

    def _notes(self) -> Iterator[str]:
        """What the user should know before the run begins."""
        yield from self.task.notes
        yield from self.teacher.notes
        yield from self.parallel.notes
        several = self.accelerator.num_processes > 1
        if several and has_batchnorm(self.module) and not self.recipe.train.sync_batchnorm:
            yield (
                "each process computes batch norm over its own share of a batch, so that the loss "
                "depends on the number of processes; train.sync_batchnorm=true computes it over all"
            )
        batches = -(-self.total // self.updates_per_batch)
        if isinstance(self.loss, Warmup) and self.loss.steps > batches:
            yield (
                f"the warm-up of {self.loss.steps} steps is longer than the run of {batches}: "
                f"{self.recipe.method['name']} itself is never used; method.warmup_steps sets it"
            )

    def upcoming(self) -> Iterator[tuple[list[Batch], Tensor]]:
        """The batches to come: this process's micro-batches, and the samples of all processes."""
        plan = self._plan(self.state.step, self.state.epoch, self.state.position)
        patience = self.recipe.train.patience
        for item in _one_ahead(plan) if self.recipe.train.workers else plan:
            if patience is not None and self.state.stale >= patience:
                self.display.say(f"no better model in {patience} evaluations: done")
                return
            yield item

    def _plan(self, step: int, epoch: int, position: int) -> Iterator[tuple[list[Batch], Tensor]]:
        while step < self.total:
            index = self.task.global_batch(epoch, position)
            batch = [self._share(part, epoch) for part in self._micro_batches(index)], index
            updates = self.updates_per_batch - step % self.updates_per_batch  # still to make on it
            for _ in range(min(updates, self.total - step)):
                yield batch
            step += updates
            position += 1
            if position == self.task.steps_per_epoch:
                epoch, position = epoch + 1, 0

    def _micro_batches(self, index: Tensor) -> tuple[Tensor, ...]:
        return index.tensor_split(min(self.recipe.train.accumulate, len(index)))

    def _share(self, samples: Tensor, epoch: int) -> Batch:
        """This process's samples of a micro-batch.

        All processes must take part in every step. One that has no sample takes one whose loss is
        ignored.
        """
        mine = samples.tensor_split(self.accelerator.num_processes)[self.accelerator.process_index]
        if len(mine) == 0:
            return self.task.batch(samples[:1], epoch).without_targets()
        return self.task.batch(mine, epoch)

    def update(self, batches: list[Batch], index: Tensor) -> None:
        """One optimizer step on a global batch.

        Args:
            batches: this process's micro-batches.
            index: (N,) the samples of all processes.
        """
        accelerator, recipe, state = self.accelerator, self.recipe, self.state
        torch.manual_seed(mix(recipe.seed, "step", state.step, accelerator.process_index))
        self.module.train()
        count = self.task.count(index, batches[0].epoch)
        total = torch.zeros((), device=accelerator.device)
        seen = []
        for number, batch in enumerate(batches, 1):
            ignored = accelerator.num_processes > 1 and _is_ignored(batch)
            batch = batch.to(accelerator.device)
            last = number == len(batches)
            with (
                nullcontext() if last else self.parallel.accumulating(self.model),
                nothing_counted(ignored),
            ):
                with accelerator.autocast():
                    outputs, further = self.teacher.run(self.task, self.model, batch)
                further = (*further, *self.teacher(batch, outputs))
                loss = self.task.loss(self.loss, outputs, batch, further) / count
                # The processes take the mean of their gradients; the sum is wanted.
                accelerator.backward(loss * accelerator.num_processes)
            total += loss.detach()
            seen.append((batch.index, self.task.sums(outputs, batch)))
        for parameter in self.loss.parameters():  # not part of the data-parallel model
            parameter.grad = accelerator.reduce(parameter.grad, "mean")
        norm = self.parallel.clip(self._parameters(), recipe.optim.clip_norm or math.inf)
        asked = torch.full_like(total, float(self.interruptions.requested))
        value, asked_to_stop = accelerator.reduce(torch.stack([total, asked]), "sum").tolist()
        self._check_finite(value, float(norm), seen, index)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(recipe.optim, state.step, state.epoch, self.total)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._update_ema()
        self.teacher.step()
        state.loss_sum += value
        state.loss_steps += 1
        self.stopping = asked_to_stop > 0

    def _update_ema(self) -> None:
        """ema <- d ema + (1 - d) weights, with d = min(decay, (1 + t) / (10 + t)) after t steps.

        The smaller d of the first steps keeps the average from remembering the random start.
        """
        if self.recipe.train.ema is None:
            return
        done = self.state.step
        decay = min(self.recipe.train.ema, (1 + done) / (10 + done))
        _blend(self.ema, self.module.state_dict(), 1 - decay)

    @contextmanager
    def _evaluated(self) -> Iterator[dict[str, Tensor]]:
        """The weights that are evaluated, which the module has meanwhile: its own, or the average.

        The running statistics are those of the first process.
        """
        for buffer in self.module.buffers():
            broadcast(buffer)
        if not self.ema:
            yield self.module.state_dict()
            return
        own = {name: tensor.clone() for name, tensor in self.module.state_dict().items()}
        try:
            self.module.load_state_dict(self.ema)
            for buffer in self.module.buffers():
                broadcast(buffer)
            yield self.module.state_dict()
        finally:
            self.module.load_state_dict(own)

    def _parameters(self) -> list[nn.Parameter]:
        return [*self.module.parameters(), *self.loss.parameters()]

    def _check_finite(
        self, loss: float, norm: float, seen: list[tuple[Tensor, Tensor]], index: Tensor
    ) -> None:
        """Stop before the update if the loss or the gradient is not finite, on all processes.

        ``seen`` has the samples of this process, with a sum over the outputs of each.
        """
        # With fp16 the scaler itself skips a step with an infinite gradient.
        scaled = self.accelerator.scaler is not None
        if math.isfinite(loss) and (scaled or math.isfinite(norm)):
            return
        bad = [samples.to(sums.device)[~sums.isfinite()] for samples, sums in seen]
        culprits = gather_rows(self.accelerator, torch.cat(bad)).tolist() or index.tolist()
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
        if self.accelerator.is_main_process:
            self.run.log({"step": self.state.step + 1, "stopped": what, "samples": culprits})
        shown = ", ".join(map(str, culprits[:_NAMED_SAMPLES]))
        more = len(culprits) - _NAMED_SAMPLES
        rest = f" and {more} more, listed in {self.run.metrics_file}" if more > 0 else ""
        raise LabError(
            f"stopped before the update of step {self.state.step + 1}: {what}, on training samples "
            f"{shown}{rest}; last good checkpoint: {self.saved or 'none'}"
        )

    # ------------------------------------------------------------------ between the steps

    def log(self) -> None:
        """A line of metrics: the mean loss since the line before."""
        state = self.state
        loss = state.loss_sum / state.loss_steps
        rate = self.optimizer.param_groups[0]["lr"]
        epoch = self._epoch()
        line = {"step": state.step, "epoch": epoch, "loss": loss, "lr": rate}
        self._write(line | {"seconds": round(state.seconds, 3)}, {"train/loss": loss, "lr": rate})
        self.display.logged(state.step, epoch, loss)
        state.loss_sum, state.loss_steps = 0.0, 0

    def _epoch(self) -> int:
        """The epoch of the last step, from 1."""
        return (self.state.step - 1) // self.steps_per_epoch + 1

    def _write(self, line: dict[str, Any], curves: dict[str, float]) -> None:
        if self.accelerator.is_main_process:
            self.run.log(line)
        self.accelerator.log(curves, step=self.state.step)

    def evaluate(self) -> None:
        """Score the model on the validation split, and select it if it is the best so far."""
        with self._evaluated() as weights:
            metrics = self.task.validate(self.module, self.accelerator)
            with self.interruptions.deferred():
                self._note_scores(metrics, weights)
        self._stop_if_asked()

    def _note_scores(self, metrics: Mapping[str, float], weights: dict[str, Tensor]) -> None:
        """Log the scores of an evaluation, and select the model if they are the best so far."""
        state, train = self.state, self.recipe.train
        if not all(map(math.isfinite, metrics.values())):
            raise LabError(
                f"stopped at step {state.step}: the scores on the validation split are {metrics}; "
                f"last good checkpoint: {self.saved or 'none'}"
            )
        curves = {f"valid/{name}": value for name, value in metrics.items()}
        self._write({"step": state.step, "epoch": self._epoch(), "valid": metrics}, curves)
        value, nll = metrics[self.recipe.selected_by], metrics.get("nll")
        sign = 1 if self.task.higher_is_better[train.select] else -1
        better = state.best is None or sign * value > sign * state.best
        # Of equal scores the one with the lower NLL is selected, then the later one.
        lower = nll is None or state.best_nll is None or nll <= state.best_nll
        selected = better or (value == state.best and lower)
        self.display.evaluated(state.step, metrics, self.recipe.selected_by, selected)
        state.stale = 0 if better else state.stale + 1
        if selected:
            state.best, state.best_nll, state.best_step = value, nll, state.step
            self._select(weights)
        if self._is_averaged(state.step):
            self._add_to_average()
        self._keep(KeptModel(step=state.step, score=value, nll=nll))
        state.evaluated = state.step

    def _keep(self, model: KeptModel) -> None:
        """Keep the weights if they are among the best or the last ones."""
        state, train = self.state, self.recipe.train
        known = [*state.kept, model]
        last = known[max(0, len(known) - train.keep_last) :]
        best = ranked(known, self.task.higher_is_better[train.select])[: train.keep_best]
        state.kept = [one for one in known if one in last or one in best]
        if model in state.kept:
            weights = self.parallel.whole(self.module.state_dict())
            if self.accelerator.is_main_process:
                self.run.keep_model(model.step, weights)

    def _select(self, weights: dict[str, Tensor]) -> None:
        whole = self.parallel.whole(weights)
        if self.accelerator.is_main_process:
            self.run.select(*self.task.model_files(self.module, whole))
        self.accelerator.wait_for_everyone()

    def _add_to_average(self) -> None:
        self.state.averaged += 1
        _blend(self.average, self.module.state_dict(), 1 / self.state.averaged)

    def save(self) -> None:
        """Write a checkpoint."""
        with self.interruptions.deferred():
            self._save()
        self._stop_if_asked()

    def _save(self) -> None:
        # The state of a loss can differ between processes (OLS): one row per process.
        loss = {
            name: self.accelerator.gather(tensor.to(self.accelerator.device).unsqueeze(0))
            for name, tensor in self.loss.state_dict().items()
        }
        state = self.state.model_dump() | {"processes": self.accelerator.num_processes}
        if self.accelerator.scaler is not None:
            state["scaler"] = self.accelerator.scaler.state_dict()
        tensors = {
            "model": self.module.state_dict(),
            "optimizer": _flat(self.optimizer.state_dict()["state"]),
            "loss": loss,
            "teacher": self.teacher.state_dict(),
            "average": self.average,
            "ema": self.ema,
        }
        folder, digest = self.run.checkpoints, self.recipe.digest()
        self.saved = checkpoint.save(
            folder, self.state.step, state, tensors, digest, self.accelerator
        )
        if self.accelerator.is_main_process:
            # After the checkpoint: a run that goes on from the one before still has its models.
            self._list_kept()
        self.saved_step = self.state.step
        self.accelerator.wait_for_everyone()

    def restore(self) -> None:
        """Continue from the newest whole checkpoint, if there is one."""
        folder, digest = self.run.checkpoints, self.recipe.digest()
        say = self.display.say
        found = checkpoint.latest(folder, digest, SavedState, say, self.accelerator)
        if found is not None:
            self._take_up(found)
            self.saved, self.saved_step = found.path, self.state.step
            self.display.say(f"continuing {self.run.path} at step {self.state.step:,}")
            if self.state.earlier_processes:
                others = " and ".join(map(str, self.state.earlier_processes))
                self.display.say(f"note: {others} process(es) were at work before; the bits differ")
            if changed := self.run.changes_since_start():
                self.display.say(f"note: it was begun with {changed}; the bits may differ")
            if self.state.best_step and not self.recipe.train.average_last:
                self._repair_best()
        if (device := device_name(self.accelerator.device)) not in self.state.devices:
            self.state.devices.append(device)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            checkpoint.tidy(self.run.checkpoints)
            self.run.forget_after(self.state.step, self.display.say)
            self._list_kept()  # the run may have been killed just after it saved the checkpoint
        self.display.advance(self.state.step)
        start_trackers(self.accelerator, self.recipe, self.run.path, self.state.step)

    def _list_kept(self) -> None:
        self.run.list_kept([model.model_dump() for model in self.state.kept])

    def _repair_best(self) -> None:
        if self.accelerator.is_main_process:
            repair_best(self.run, self.recipe, self.task, lambda: self.module, self.display.say)

    def _take_up(self, found: checkpoint.Checkpoint) -> None:
        saved: SavedState = found.state
        try:
            self._load(saved, found.groups(self._like()))
        except (KeyError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise LabError(
                f"{found.path} does not fit the model of the recipe; remove it to continue from "
                "the checkpoint before it"
            ) from error

    def _like(self) -> checkpoint.Like:
        """For a tensor of a checkpoint one that is split over the processes as it is to be."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        weights = self.module.state_dict()
        known = {"model": weights, "average": weights, "ema": weights}
        known["teacher"] = self.teacher.state_dict()

        def like(group: str, name: str) -> Tensor | None:
            if group == "optimizer":  # named by the number of the parameter
                return parameters[int(name.partition(".")[0])]
            return known.get(group, {}).get(name)

        return like

    def _load(self, saved: SavedState, tensors: dict[str, dict[str, Tensor]]) -> None:
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(saved.scaler)
        self.state = TrainingState(**saved.model_dump(exclude={"processes", "scaler"}))
        if saved.processes != self.accelerator.num_processes:
            self.state.earlier_processes.append(saved.processes)
        self.module.load_state_dict(tensors["model"])
        self.loss.load_state_dict(self._share_of_loss(tensors["loss"], saved.processes))
        self.teacher.load_state_dict(tensors["teacher"])
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict(
            {"state": _nested(tensors["optimizer"]), "param_groups": groups}
        )
        self.average, self.ema = (
            {name: tensor.to(self.accelerator.device) for name, tensor in tensors[group].items()}
            for group in ("average", "ema")
        )

    def _share_of_loss(self, rows: Mapping[str, Tensor], processes: int) -> dict[str, Tensor]:
        """This process's state of the loss, from those of all processes that saved it.

        If there are more or fewer now, the first one takes the sum of what adds up over them.
        """
        mine = self.accelerator.process_index
        if processes == self.accelerator.num_processes:
            return {name: row[mine] for name, row in rows.items()}
        added_up = {
            f"{prefix}.{name}".removeprefix(".")
            for prefix, module in self.loss.named_modules()
            for name in getattr(module, "per_process", ())
        }
        return {
            name: (row.sum(0) if mine == 0 else torch.zeros_like(row[0]))
            if name in added_up
            else row[0]
            for name, row in rows.items()
        }

    def finish(self, test: bool) -> dict[str, Any]:
        """Score the selected model; on the test split this is the first and only time."""
        if self.average:
            self._select(self.average)
        model = self.parallel.place(load_model(self.run))
        found = {
            split: self.task.evaluate(model, split, self.accelerator)
            for split in (("valid", "test") if test else ("valid",))
        }
        scores = {split: evaluation.metrics for split, evaluation in found.items()}
        results = scores | {
            "signature": self.run.signature(
                self.recipe,
                data=self.task.fingerprint,
                steps=self.state.step,
                processes=[*self.state.earlier_processes, self.accelerator.num_processes],
            ),
            "steps": self.state.step,
            "selected_step": self.state.step if self.average else self.state.best_step,
            "seconds": round(self.state.seconds, 3),
            "devices": self.state.devices,
            "peak_memory": peak_memory(),
            "notes": self.notes,
            "model": self.run.model,
            **found["valid"].about,
        }
        if self.accelerator.is_main_process:
            self.run.finish(results)
        # All leave together. A process that ends while gloo still frees the tensors of its last
        # collective can wait for ever (PyTorch 2.13).
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()
        return results


def ranked(models: Iterable[KeptModel], higher_is_better: bool) -> list[KeptModel]:
    """The best first; of equal scores the one with the lower NLL, then the later one."""
    sign = -1 if higher_is_better else 1

    def rank(model: KeptModel) -> tuple[float, float, int]:
        return sign * model.score, math.inf if model.nll is None else model.nll, -model.step

    return sorted(models, key=rank)


def repair_best(
    run: RunDirectory,
    recipe: Recipe,
    task: Task,
    build: Callable[[], nn.Module],
    report: Callable[[str], None],
) -> None:
    """Write ``best`` again from a checkpoint if it is missing or damaged.

    Args:
        run: the run.
        recipe: its recipe.
        task: its task.
        build: makes a model of the task, for its structure.
        report: called with a sentence if ``best`` had to be written again.

    Raises:
        DamagedError: it is damaged, and no checkpoint has the selected weights.
    """
    try:
        run.verify_best()
    except DamagedError as error:
        step, weights = _selected_weights(run, recipe)
        if step == 0:
            raise  # nothing was selected yet
        if weights is None:
            raise DamagedError(
                f"{error}, and no checkpoint has the selected model of step {step}: train the "
                "recipe again with another --out"
            ) from error
        calibrated = (run.best / "calibration.json").is_file()
        run.select(*task.model_files(build(), weights))
        lost = ", without its temperature: run labo calibrate again" if calibrated else ""
        report(f"{error}; {run.best} was written again from the checkpoint of step {step}{lost}")


def _selected_weights(run: RunDirectory, recipe: Recipe) -> tuple[int, dict[str, Tensor] | None]:
    """The step of the selected model, and its weights if a checkpoint has them."""
    step = run.results().get("selected_step") if run.finished else None
    for found in checkpoint.usable(
        run.checkpoints, recipe.digest(), SavedState, report=lambda reason: None
    ):
        if step is None:
            step = found.state.best_step
        if found.state.step == step:
            averaged = run.finished and recipe.train.average_last
            own = "model" if recipe.train.ema is None else "ema"
            return step, found.group("average" if averaged else own)
    return step or 0, None


def peak_memory() -> int:
    """The most memory this process has held so far, in bytes: of the GPU if it works on one."""
    if not on_cpu():
        return int(torch.accelerator.max_memory_allocated())
    status = Path("/proc/self/status")
    if status.is_file():  # on Linux ru_maxrss includes the process that started this one
        lines = status.read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes if sys.platform == "darwin" else kilobytes * 1024


def _accelerator(recipe: Recipe, run: RunDirectory) -> Accelerator:
    """Devices, processes and precision, as the launcher and the recipe say."""
    if on_cpu() and recipe.train.precision == "fp16":
        raise RequestError("train.precision: fp16 needs a GPU; bf16 works on a CPU")
    return make_accelerator(
        recipe.train.precision,
        log_with=installed_trackers(recipe.train.log_with) or None,  # it warns about an empty list
        project_config=ProjectConfiguration(
            str(run.path), logging_dir=str(run.path / "tensorboard")
        ),
    )


@torch.no_grad()
def _blend(average: dict[str, Tensor], weights: Mapping[str, Tensor], share: float) -> None:
    """Move an average towards weights by a share; what is new or not a float is copied."""
    for name, tensor in weights.items():
        if name in average and tensor.is_floating_point():
            average[name].lerp_(tensor, share)
        else:
            average[name] = tensor.clone()


def _tell(loss: nn.Module, event: str) -> None:
    """Call the loss's ``step()`` or ``end_epoch()``, if it has one."""
    hook: Callable[[], None] | None = getattr(loss, event, None)
    if hook is not None:
        hook()


def _is_ignored(batch: Batch) -> bool:
    """Whether a batch is one of ``Batch.without_targets``."""
    return not batch.target.is_floating_point() and bool((batch.target == -100).all())


def _divides(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def _one_ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items; each is made while the one before it is in use."""
    with ThreadPoolExecutor(1) as worker:
        coming = worker.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = worker.submit(next, items, None)
            yield item


def _flat(state: dict[int, dict[str, Any]]) -> dict[str, Tensor]:
    """An optimizer's state as named tensors."""
    return {
        f"{parameter}.{name}": torch.as_tensor(value)
        for parameter, values in state.items()
        for name, value in values.items()
        if value is not None
    }


def _nested(tensors: dict[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """The inverse of ``_flat``."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        parameter, name = key.split(".", 1)
        state.setdefault(int(parameter), {})[name] = tensor
    return state
