"""The training loop, for every task and every method.

batch -> teacher -> loss -> backward -> check -> optimizer step -> evaluate -> save

No random state is kept between steps: the order of the samples, their augmentation, dropout and the
learning rate are functions of the seed, the epoch, the sample and the step. A checkpoint, written
between two optimizer steps, is therefore enough to continue a killed run bit for bit. What it holds
is the state of one object, :class:`labo.lab.run.checkpoint.RunState`. A method that makes several
updates in a row on each batch is saved between two batches.

With several processes each takes its share of the same global batch, and the loss is divided by
the number of targets in the whole batch. The loss curve is then that of one process, up to
rounding, if the model has no batch norm or ``train.sync_batchnorm`` is on. Without it each process
normalises its own share of the batch.

A run may be continued by another number of processes: the samples and their order stay the same,
and the loss curve does up to rounding. The bits are those of an uninterrupted run only if the
number stays the same.

How the model is spread over the processes, whole on each or split, is the business of
:mod:`labo.lab.run.sharding`.

Ctrl-C and SIGTERM let the updates on the batch under way finish, save a checkpoint and end the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch import Tensor, nn

from ..losses import Warmup
from .config import Recipe
from .errors import LabError, RequestError
from .methods import METHODS, updates_per_batch
from .optim import build_optimizer, learning_rate
from .run.checkpoint import Checkpoints, KeptModel, RunState
from .run.directory import TEACHER, RunDirectory
from .run.distributed import (
    device_name,
    gather_rows,
    has_batchnorm,
    is_lost_process,
    make_accelerator,
    note_conditions,
    nothing_counted,
    on_cpu,
    owned,
    peak_memory,
    synchronize_batchnorm,
)
from .run.interrupt import Interruptions
from .run.progress import Display
from .run.seeds import mix
from .run.sharding import spread
from .run.trackers import installed_trackers, missing_tensorboard, start_trackers
from .schedule import Schedule, ahead
from .selection import Selection, evaluated_weights, follow, repair_best
from .tasks import Batch, find_task, load_model

_NAMED_SAMPLES = 16  # how many samples a message lists


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
        with owned(run):
            run.check(recipe)  # again: another process may have been at work until now
            return run.results() if run.finished else trainer.train(test)
    except Exception as error:
        if trainer.accelerator.num_processes > 1 and is_lost_process(error):
            raise LabError(
                "another process of this run has ended (its own message is above, unless it was "
                "killed); the same command continues the run from its last checkpoint"
            ) from error
        raise


class Trainer:
    """The parts of a run, and the loop over them."""

    def __init__(self, recipe: Recipe, run: RunDirectory, *, accept_data: bool = False) -> None:
        self.recipe, self.run, self.accept_data = recipe, run, accept_data
        accelerator = self.accelerator = _accelerator(recipe, run)
        self.several = accelerator.num_processes > 1  # processes
        self.parallel = spread(recipe.train.parallel, accelerator)
        self.task = task = find_task(recipe.task)(recipe)
        if not accept_data:
            run.check_data(task.fingerprint)
        self.schedule = Schedule(
            recipe.train, task.steps_per_epoch, updates_per_batch(recipe.method)
        )

        torch.manual_seed(mix(recipe.seed, "model"))
        model = task.build_model()
        if recipe.train.sync_batchnorm and self.several:
            model = synchronize_batchnorm(model, accelerator.device)
        facts = {
            "num_classes": task.num_classes,
            "epochs": self.schedule.epoch_of(self.schedule.total),
            "task": task,
            "model": model,
            "accelerator": accelerator,
            "parallel": self.parallel,
            "seed": recipe.seed,
        }
        loss, self.teacher = METHODS[recipe.method["name"]].build(recipe.method, facts)
        if not accept_data:
            run.check_data(self.teacher.fingerprint, TEACHER)
        self.parallel.place(model)
        # In steps the model is called as `prepared`, which may wrap it for several processes.
        self.prepared, optimizer = self.parallel.prepare(
            model, build_optimizer(recipe.optim, model, loss.to(accelerator.device))
        )
        self.state = RunState(model, optimizer, loss, self.teacher, accelerator)
        self.checkpoints = Checkpoints(run.checkpoints, recipe.digest())
        self.selection = Selection(run, task, self.schedule, self.state, self.parallel)
        self.notes = [*task.notes, *self.teacher.notes, *self.parallel.notes, *self.own_notes()]
        self.interruptions = Interruptions()
        self.stopping = False  # all processes have agreed to stop after this step
        self.between_batches = True  # the state is one that can be saved

    def train(self, test: bool) -> dict[str, Any]:
        """The whole run, or the rest of it; ``test`` says whether it ends on the test split."""
        if self.accelerator.is_main_process:
            self.run.start(self.recipe, self.task.fingerprint, self.teacher.fingerprint)
            note_conditions(self.run, self.accelerator.num_processes)
            if self.accept_data:
                self.run.accept_data(self.task.fingerprint, self.teacher.fingerprint)
        self.accelerator.wait_for_everyone()
        display = Display(self.schedule.total, silent=not self.accelerator.is_main_process)
        with self.interruptions.handled(), display as self.display:
            self.introduce()
            self.restore()
            try:
                self.loop()
                return self.finish(test)
            except KeyboardInterrupt:
                # Saved if the state is whole and every process is here to take part.
                together = self.stopping or not self.several
                unsaved = self.state.counters.step > self.checkpoints.newest_step
                if together and self.between_batches and unsaved:
                    self.save()
                raise

    def loop(self) -> None:
        """Steps, and what is due after each, until the run has its length or stops improving."""
        counters, schedule = self.state.counters, self.schedule
        began = time.perf_counter() - counters.seconds
        if schedule.is_evaluated(counters.step) and counters.evaluated < counters.step:
            self.evaluate()  # the run was interrupted before or while it did
            self.save()
        for batches, samples in self.upcoming():
            with self.interruptions.deferred():
                self.between_batches = False
                self.update(batches, samples)
                counters.step += 1
                between_batches = schedule.is_between_batches(counters.step)
                if between_batches:
                    counters.position += 1
                    _tell(self.state.loss, "step")
                if counters.position == schedule.batches_per_epoch:
                    counters.epoch, counters.position = counters.epoch + 1, 0
                    _tell(self.state.loss, "end_epoch")
                counters.seconds = time.perf_counter() - began
                self.between_batches = between_batches
                self.display.advance(counters.step, self.task.count(samples, batches[0].epoch))
                if schedule.is_logged(counters.step):
                    self.log()
            self.stop_if_asked()
            if schedule.is_evaluated(counters.step):
                self.evaluate()
                counters.seconds = time.perf_counter() - began
            if schedule.is_saved(counters.step):
                self.save()

    # ------------------------------------------------------------------ the parts of a step

    def upcoming(self) -> Iterator[tuple[list[Batch], Tensor]]:
        """The batches to come. Several processes must agree before any of them may stop."""
        counters, patience = self.state.counters, self.recipe.train.patience
        planned = self.schedule.batches(self.task, counters, self.accelerator)
        planned = ahead(planned) if self.recipe.train.workers else planned
        while True:
            with self.interruptions.deferred() if self.several else nullcontext():
                batch = next(planned, None)
                if batch is not None and patience is not None and counters.stale >= patience:
                    self.display.say(f"no better model in {patience} evaluations: done")
                    batch = None
            if batch is None:
                return
            yield batch

    def update(self, batches: list[Batch], samples: Tensor) -> None:
        """One optimizer step: this process's micro-batches, and (N,) the samples of all."""
        accelerator, state, optim = self.accelerator, self.state, self.recipe.optim
        step, epoch = state.counters.step, state.counters.epoch
        torch.manual_seed(mix(self.recipe.seed, "step", step, accelerator.process_index))
        state.model.train()
        total, seen = self.backward(batches, self.task.count(samples, batches[0].epoch))
        for parameter in state.loss.parameters():  # not part of the data-parallel model
            parameter.grad = accelerator.reduce(parameter.grad, "mean")
        parameters = [*state.model.parameters(), *state.loss.parameters()]
        norm = self.parallel.clip(parameters, optim.clip_norm or math.inf)
        asked = torch.full_like(total, float(self.interruptions.requested))
        loss, asked_to_stop = accelerator.reduce(torch.stack([total, asked]), "sum").tolist()
        self.check_finite(loss, float(norm), seen, samples)
        for group in state.optimizer.param_groups:
            group["lr"] = learning_rate(optim, step, epoch, self.schedule.total)
        state.optimizer.step()
        state.optimizer.zero_grad()
        if self.recipe.train.ema is not None:
            follow(state, self.recipe.train.ema)
        self.teacher.step()
        state.counters.loss_sum += loss
        state.counters.loss_steps += 1
        self.stopping = asked_to_stop > 0

    def backward(
        self, batches: list[Batch], count: int
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Forward and backward passes of this process's micro-batches.

        ``count`` is the number of targets of all processes. Returned are the part of these batches
        in the loss, and their samples with a sum over the outputs of each.
        """
        accelerator, task = self.accelerator, self.task
        total = torch.zeros((), device=accelerator.device)
        seen = []
        for number, batch in enumerate(batches, 1):
            ignored = self.several and _is_ignored(batch)
            batch = batch.to(accelerator.device)
            last = number == len(batches)
            with (
                nullcontext() if last else self.parallel.accumulating(self.prepared),
                nothing_counted(ignored),
            ):
                with accelerator.autocast():
                    outputs, further = self.teacher.run(task, self.prepared, batch)
                further = (*further, *self.teacher(batch, outputs))
                loss = task.loss(self.state.loss, outputs, batch, further) / count
                # The processes take the mean of their gradients; the sum is wanted.
                accelerator.backward(loss * accelerator.num_processes)
            total += loss.detach()
            seen.append((batch.index, task.sums(outputs, batch)))
        return total, seen

    def check_finite(
        self, loss: float, norm: float, seen: list[tuple[Tensor, Tensor]], samples: Tensor
    ) -> None:
        """Stop before the update if the loss or the gradient is not finite, on all processes.

        ``seen`` has the samples of this process, with a sum over the outputs of each.
        """
        # With fp16 the scaler itself skips a step with an infinite gradient.
        scaled = self.accelerator.scaler is not None
        if math.isfinite(loss) and (scaled or math.isfinite(norm)):
            return
        bad = [index.to(sums.device)[~sums.isfinite()] for index, sums in seen]
        culprits = gather_rows(self.accelerator, torch.cat(bad)).tolist() or samples.tolist()
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
        step = self.state.counters.step + 1
        if self.accelerator.is_main_process:
            self.run.log({"step": step, "stopped": what, "samples": culprits})
        shown = ", ".join(map(str, culprits[:_NAMED_SAMPLES]))
        more = len(culprits) - _NAMED_SAMPLES
        rest = f" and {more} more, listed in {self.run.metrics_file}" if more > 0 else ""
        raise LabError(
            f"stopped before the update of step {step}: {what}, on training samples {shown}{rest}; "
            f"last good checkpoint: {self.checkpoints.newest or 'none'}"
        )

    def stop_if_asked(self) -> None:
        """End the run if a signal came during the updates on a batch."""
        asked = self.stopping or (self.interruptions.requested and not self.several)
        if asked and self.between_batches:
            raise KeyboardInterrupt

    # ------------------------------------------------------------------ between the steps

    def log(self) -> None:
        """A line of metrics: the mean loss since the line before."""
        counters = self.state.counters
        step, epoch = counters.step, self.schedule.epoch_of(counters.step)
        loss = counters.loss_sum / counters.loss_steps
        rate = self.state.optimizer.param_groups[0]["lr"]
        line = {"step": step, "epoch": epoch, "loss": loss, "lr": rate}
        self.write(line | {"seconds": round(counters.seconds, 3)}, {"train/loss": loss, "lr": rate})
        self.display.logged(step, epoch, loss)
        counters.loss_sum, counters.loss_steps = 0.0, 0

    def write(self, line: Mapping[str, Any], curves: Mapping[str, float]) -> None:
        """Add a line to the metrics, and its curves to the trackers."""
        if self.accelerator.is_main_process:
            self.run.log(line)
        self.accelerator.log(dict(curves), step=self.state.counters.step)

    def evaluate(self) -> None:
        """Score the model on the validation split, and select it if it is the best so far."""
        with evaluated_weights(self.state) as weights:
            metrics = self.task.validate(self.state.model, self.accelerator)
            with self.interruptions.deferred():
                self.note_scores(metrics, weights)
        self.stop_if_asked()

    def note_scores(self, metrics: Mapping[str, float], weights: Mapping[str, Tensor]) -> None:
        """Log the scores of an evaluation, and select the model if they are the best so far."""
        step, by = self.state.counters.step, self.recipe.selected_by
        if not all(map(math.isfinite, metrics.values())):
            raise LabError(
                f"stopped at step {step}: the scores on the validation split are {metrics}; "
                f"last good checkpoint: {self.checkpoints.newest or 'none'}"
            )
        curves = {f"valid/{name}": value for name, value in metrics.items()}
        epoch = self.schedule.epoch_of(step)
        self.write({"step": step, "epoch": epoch, "valid": metrics}, curves)
        model = KeptModel(step=step, score=metrics[by], nll=metrics.get("nll"))
        self.display.evaluated(step, metrics, by, self.selection.is_best(model))
        self.selection.add(model, weights)

    def save(self) -> None:
        """Write a checkpoint."""
        with self.interruptions.deferred():
            self.checkpoints.save(self.state)
            # After the checkpoint: a run that goes on from the one before still has its models.
            self.list_kept()
            self.accelerator.wait_for_everyone()
        self.stop_if_asked()

    def list_kept(self) -> None:
        """Write the list of the kept models, and remove all others."""
        if self.accelerator.is_main_process:
            self.run.list_kept([model.model_dump() for model in self.state.counters.kept])

    # ------------------------------------------------------------------ the beginning and the end

    def introduce(self) -> None:
        """Say what is trained, and what the user should know."""
        for name, text in self.facts().items():
            self.display.say(f"{name:<10} {text}")
        missing = missing_tensorboard(self.recipe.train.log_with)
        for note in (*self.notes, *([missing] if missing else [])):
            self.display.say(f"note: {note}")

    def facts(self) -> dict[str, str]:
        """What is trained, on what and where."""
        recipe, task, schedule = self.recipe, self.task, self.schedule
        trained = sum(p.numel() for p in self.state.model.parameters() if p.requires_grad)
        device = f"{self.accelerator.device.type}: {device_name(self.accelerator.device)}"
        if self.several:
            device += f", {self.accelerator.num_processes} processes"
            device += " with a share of the model each" if recipe.train.parallel == "fsdp" else ""
        precision = {"no": "float32"}.get(recipe.train.precision, recipe.train.precision)
        hyper = [f"{key}={value}" for key, value in recipe.method.items() if key != "name"]
        facts = {
            "data": f"{task.fingerprint}: {task.size:,} training samples, "
            f"{task.num_classes:,} classes, {schedule.steps_per_epoch:,} steps per epoch",
            "model": f"{trained:,} parameters",
            "device": f"{device}, {precision}",
            "method": " ".join([recipe.method["name"], *hyper]),
            "length": f"{schedule.total:,} steps; selected by {recipe.selected_by}, "
            f"every {schedule.evaluation_steps:,} steps",
        }
        if recipe.train.ema is not None:
            facts["average"] = f"moving average of the weights, decay {recipe.train.ema:g}"
        return facts | task.scored_by() | {"folder": str(self.run.path)}

    def own_notes(self) -> Iterator[str]:
        """What the user should know of model and loss before the run begins."""
        loss, train = self.state.loss, self.recipe.train
        if self.several and has_batchnorm(self.state.model) and not train.sync_batchnorm:
            yield (
                "each process computes batch norm over its own share of a batch, so that the loss "
                "depends on the number of processes; train.sync_batchnorm=true computes it over all"
            )
        batches = -(-self.schedule.total // self.schedule.updates_per_batch)
        if isinstance(loss, Warmup) and loss.steps > batches:
            yield (
                f"the warm-up of {loss.steps} steps is longer than the run of {batches}: "
                f"{self.recipe.method['name']} itself is never used; method.warmup_steps sets it"
            )

    def restore(self) -> None:
        """Continue from the newest whole checkpoint, if there is one."""
        run, say = self.run, self.display.say
        if self.checkpoints.restore(self.state, say):
            say(f"continuing {run.path} at step {self.state.counters.step:,}")
            if earlier := self.state.counters.earlier_processes:
                others = " and ".join(map(str, earlier))
                say(f"note: {others} process(es) were at work before; the bits differ")
            if changed := run.changes_since_start():
                say(f"note: it was begun with {changed}; the bits may differ")
            selected = self.state.counters.best_step and not self.recipe.train.average_last
            if selected and self.accelerator.is_main_process:
                repair_best(run, self.task, lambda: self.state.model, say)
        counters = self.state.counters
        if (device := device_name(self.accelerator.device)) not in counters.devices:
            counters.devices.append(device)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            self.checkpoints.tidy()
            run.forget_after(counters.step, say)
        self.list_kept()  # the run may have been killed just after it saved
        self.display.advance(counters.step)
        start_trackers(self.accelerator, self.recipe, run.path, counters.step)

    def finish(self, test: bool) -> dict[str, Any]:
        """Score the selected model; on the test split this is the first and only time."""
        state, counters = self.state, self.state.counters
        if state.average:
            self.selection.select(state.average)
        model = self.parallel.place(load_model(self.run))
        evaluations = {
            split: self.task.evaluate(model, split, self.accelerator)
            for split in (("valid", "test") if test else ("valid",))
        }
        scores = {split: evaluation.metrics for split, evaluation in evaluations.items()}
        results = scores | {
            "signature": self.run.signature(
                self.recipe,
                data=self.task.fingerprint,
                steps=counters.step,
                processes=[*counters.earlier_processes, counters.processes],
            ),
            "steps": counters.step,
            "selected_step": counters.step if state.average else counters.best_step,
            "seconds": round(counters.seconds, 3),
            "devices": counters.devices,
            "peak_memory": peak_memory(),
            "notes": self.notes,
            "model": self.run.model,
            **evaluations["valid"].about,
        }
        if self.accelerator.is_main_process:
            self.run.finish(results)
        self.accelerator.wait_for_everyone()  # all leave together
        if self.several:
            # A thread of gloo frees the tensors of the last collective and needs the interpreter
            # for it. Destroying the group holds the interpreter and waits for that thread: both
            # would wait for ever (PyTorch 2.13). Sleeping lets the thread finish first.
            time.sleep(0.1)
        self.accelerator.end_training()
        return results


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


def _tell(loss: nn.Module, event: str) -> None:
    """Call the loss's ``step()`` or ``end_epoch()``, if it has one."""
    hook: Callable[[], None] | None = getattr(loss, event, None)
    if hook is not None:
        hook()


def _is_ignored(batch: Batch) -> bool:
    """Whether a batch is one of ``Batch.without_targets``."""
    return not batch.target.is_floating_point() and bool((batch.target == -100).all())
