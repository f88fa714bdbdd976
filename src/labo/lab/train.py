"""The training loop, for every task and every method.

batch -> teacher -> loss -> backward -> check -> optimizer step -> evaluate -> save

Nothing random outlives a step. The order of the samples, their augmentation, dropout and the
learning rate are functions of (seed, epoch, sample) and of the step; so a checkpoint, written
between two optimizer steps, is all that a killed run needs to go on as if nothing had happened.

With many processes each takes its share of the same global batch, and the loss is divided by the
targets of the whole batch: the curve is that of one process.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, broadcast
from torch import Tensor, nn

from ..losses import Warmup
from .config import Recipe
from .errors import LabError, RequestError
from .methods import METHODS
from .optim import build_optimizer, learning_rate
from .run import checkpoint
from .run.directory import RunDirectory
from .run.distributed import gather_rows
from .run.progress import Display
from .run.seeds import mix
from .tasks import Batch, find_task, load_model

T = TypeVar("T")

_NAMED_SAMPLES = 16  # how many samples a message lists


@dataclass
class TrainingState:
    """Where a run is, apart from its tensors."""

    step: int = 0  # optimizer steps done
    epoch: int = 0  # epochs done
    position: int = 0  # batches done in this epoch
    loss_sum: float = 0.0  # since the last logged line
    loss_steps: int = 0
    best: float | None = None  # the score of the selected model
    best_step: int = 0
    stale: int = 0  # evaluations since then
    averaged: int = 0  # models in the average
    seconds: float = 0.0  # spent in training, over all its starts


def train(recipe: Recipe, out: str | Path, *, test: bool = True) -> dict[str, Any]:
    """Train, or go on training, in a run directory.

    Args:
        recipe: what to do.
        out: the run directory; made if it is not there.
        test: whether to score the selected model on the test split at the end. Without it that
            split stays untouched until ``labo evaluate`` adds its scores to the results.

    Returns:
        The content of ``results.json``.

    Raises:
        RequestError: the directory holds something else, or the recipe does not fit the data.
        LabError: the work failed; the run can be continued from its last checkpoint.
    """
    run = RunDirectory(out)
    run.check(recipe)
    if run.finished:
        return run.results()
    return Trainer(recipe, run).train(test)


class Trainer:
    """A run in the making: the parts, and the loop over them."""

    def __init__(self, recipe: Recipe, run: RunDirectory) -> None:
        self.recipe, self.run = recipe, run
        self.accelerator = _accelerator(recipe, run)
        self.task = find_task(recipe.task)(recipe)
        steps = self.task.steps_per_epoch
        limits = (recipe.train.max_steps, recipe.train.epochs and recipe.train.epochs * steps)
        self.total = min(limit for limit in limits if limit)
        every = recipe.train.eval_every_steps or recipe.train.eval_every * steps
        self.evaluated_steps = sorted({*range(every, self.total, every), self.total})

        torch.manual_seed(mix(recipe.seed, "model"))
        self.module = self.task.build_model()
        if recipe.train.sync_batchnorm:
            self.module = nn.SyncBatchNorm.convert_sync_batchnorm(self.module)
        self.module.to(self.accelerator.device)
        facts = {
            "num_classes": self.task.num_classes,
            "epochs": math.ceil(self.total / steps),
            "task": self.task,
            "model": self.module,
            "accelerator": self.accelerator,
            "seed": recipe.seed,
        }
        method = METHODS[recipe.method["name"]]
        self.loss, self.teacher = method.build(recipe.method, facts)
        self.loss.to(self.accelerator.device)
        self.model, self.optimizer = self.accelerator.prepare(
            self.module, build_optimizer(recipe.optim, self.module, self.loss)
        )
        self.average: dict[str, Tensor] = {}
        self.state = TrainingState()
        self.saved: Path | None = None  # the newest checkpoint

    def train(self, test: bool) -> dict[str, Any]:
        """The loop; ``test`` says whether it ends on the test split."""
        if self.accelerator.is_main_process:
            self.run.start(self.recipe)
        self.accelerator.wait_for_everyone()
        with Display(self.total, silent=not self.accelerator.is_main_process) as self.display:
            for note in self._notes():
                self.display.say(f"note: {note}")
            self.restore()
            state, began = self.state, time.perf_counter() - self.state.seconds
            for batches, index in self.upcoming():
                self.update(batches, index)
                state.step += 1
                state.position += 1
                if state.position == self.task.steps_per_epoch:
                    state.epoch, state.position = state.epoch + 1, 0
                    _tell(self.loss, "end_epoch")
                state.seconds = time.perf_counter() - began
                evaluated = state.step in self.evaluated_steps
                self.display.advance(state.step, self.task.count(index))
                if evaluated or state.step % self.recipe.train.log_every == 0:
                    self.log()
                if evaluated:
                    self.evaluate()
                    state.seconds = time.perf_counter() - began
                if evaluated or _divides(self.recipe.train.save_every, state.step):
                    self.save()
            return self.finish(test)

    def _notes(self) -> Iterator[str]:
        """What a person should know before it begins."""
        yield from self.task.notes
        if isinstance(self.loss, Warmup) and self.loss.steps > self.total:
            yield (
                f"the warm-up of {self.loss.steps} steps outlasts the run of {self.total}: "
                f"{self.recipe.method['name']} itself is never used; method.warmup_steps sets it"
            )

    def upcoming(self) -> Iterator[tuple[list[Batch], Tensor]]:
        """The batches from here to the end: this process's pieces, and all sample indices."""
        plan = self._plan(self.state.step, self.state.epoch, self.state.position)
        patience = self.recipe.train.patience
        for item in _one_ahead(plan) if self.recipe.train.workers else plan:
            if patience is not None and self.state.stale >= patience:
                self.display.say(f"no better model in {patience} evaluations: done")
                return
            yield item

    def _plan(self, step: int, epoch: int, position: int) -> Iterator[tuple[list[Batch], Tensor]]:
        for number in range(self.total - step):
            ahead, place = divmod(position + number, self.task.steps_per_epoch)
            index = self.task.global_batch(epoch + ahead, place)
            yield [self._share(piece, epoch + ahead) for piece in self._pieces(index)], index

    def _pieces(self, index: Tensor) -> tuple[Tensor, ...]:
        return index.tensor_split(min(self.recipe.train.accumulate, len(index)))

    def _share(self, piece: Tensor, epoch: int) -> Batch:
        """This process's samples of a piece; all processes must have some, if only to look on."""
        mine = piece.tensor_split(self.accelerator.num_processes)[self.accelerator.process_index]
        if len(mine) == 0:
            return self.task.batch(piece[:1], epoch).without_targets()
        return self.task.batch(mine, epoch)

    def update(self, batches: list[Batch], index: Tensor) -> None:
        """One optimizer step on a global batch, of which ``batches`` are this process's pieces."""
        accelerator, recipe, state = self.accelerator, self.recipe, self.state
        torch.manual_seed(mix(recipe.seed, "step", state.step, accelerator.process_index))
        self.module.train()
        count = self.task.count(index)
        total = torch.zeros((), device=accelerator.device)
        seen = []
        for number, batch in enumerate(batches, 1):
            batch = batch.to(accelerator.device)
            last = number == len(batches)
            with nullcontext() if last else accelerator.no_sync(self.model):
                with accelerator.autocast():
                    outputs = self.task.outputs(self.model, batch)
                second = self.teacher(batch, outputs)
                loss = self.task.loss(self.loss, outputs, batch, second) / count
                # Data parallelism takes the mean of the gradients where their sum is wanted.
                accelerator.backward(loss * accelerator.num_processes)
            total += loss.detach()
            seen.append((batch.index, self.task.sums(outputs, batch)))
        for parameter in self.loss.parameters():  # no part of the data-parallel model
            parameter.grad = accelerator.reduce(parameter.grad, "mean")
        norm = accelerator.clip_grad_norm_(self._parameters(), recipe.optim.clip_norm or math.inf)
        value = accelerator.reduce(total, "sum").item()
        self._check_finite(value, float(norm), seen, index)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(recipe.optim, state.step, state.epoch, self.total)
        self.optimizer.step()
        self.optimizer.zero_grad()
        _tell(self.loss, "step")
        self.teacher.step()
        state.loss_sum += value
        state.loss_steps += 1

    def _parameters(self) -> list[nn.Parameter]:
        return [*self.module.parameters(), *self.loss.parameters()]

    def _check_finite(
        self, loss: float, norm: float, seen: list[tuple[Tensor, Tensor]], index: Tensor
    ) -> None:
        """Stop before the update if anything is not a number; all processes decide alike.

        ``seen`` has the samples of this process, with a sum over the outputs of each.
        """
        scaled = self.accelerator.scaler is not None  # fp16: the scaler skips an infinite gradient
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
        return (self.state.step - 1) // self.task.steps_per_epoch + 1

    def _write(self, line: dict[str, Any], curves: dict[str, float]) -> None:
        if self.accelerator.is_main_process:
            self.run.log(line)
        self.accelerator.log(curves, step=self.state.step)

    def evaluate(self) -> None:
        """Score the model on the validation split, and select it if it is the best so far."""
        state, train = self.state, self.recipe.train
        for buffer in self.module.buffers():  # running statistics: those of the first process
            broadcast(buffer)
        metrics = self.task.validate(self.module, self.accelerator)
        if not all(map(math.isfinite, metrics.values())):
            raise LabError(
                f"stopped at step {state.step}: the scores on the validation split are {metrics}; "
                f"last good checkpoint: {self.saved or 'none'}"
            )
        curves = {f"valid/{name}": value for name, value in metrics.items()}
        self._write({"step": state.step, "epoch": self._epoch(), "valid": metrics}, curves)
        value = metrics[train.select]
        sign = 1 if self.task.higher_is_better[train.select] else -1
        better = state.best is None or sign * value > sign * state.best
        self.display.evaluated(state.step, metrics, better)
        if better:
            state.best, state.best_step, state.stale = value, state.step, 0
            self._select(self.module.state_dict())
        else:
            state.stale += 1
        if train.average_last and state.step in self.evaluated_steps[-train.average_last :]:
            self._add_to_average()

    def _select(self, weights: dict[str, Tensor]) -> None:
        if self.accelerator.is_main_process:
            self.run.select(*self.task.model_files(self.module, weights))
        self.accelerator.wait_for_everyone()

    def _add_to_average(self) -> None:
        self.state.averaged += 1
        for name, tensor in self.module.state_dict().items():
            if name in self.average and tensor.is_floating_point():
                self.average[name].lerp_(tensor, 1 / self.state.averaged)
            else:
                self.average[name] = tensor.clone()

    def save(self) -> None:
        """Write a checkpoint."""
        # A loss may gather something different on each process (OLS): one row per process.
        loss = {
            name: self.accelerator.gather(tensor.to(self.accelerator.device).unsqueeze(0))
            for name, tensor in self.loss.state_dict().items()
        }
        if self.accelerator.is_main_process:
            state = asdict(self.state) | {"processes": self.accelerator.num_processes}
            if self.accelerator.scaler is not None:
                state["scaler"] = self.accelerator.scaler.state_dict()
            tensors = {
                "model": self.module.state_dict(),
                "optimizer": _flat(self.optimizer.state_dict()["state"]),
                "loss": loss,
                "teacher": self.teacher.state_dict(),
                "average": self.average,
            }
            folder, digest = self.run.checkpoints, self.recipe.digest()
            self.saved = checkpoint.save(folder, self.state.step, state, tensors, digest)
        self.accelerator.wait_for_everyone()

    def restore(self) -> None:
        """Take up the newest whole checkpoint, if there is one."""
        found = checkpoint.latest(self.run.checkpoints, self.recipe.digest(), self.display.say)
        if found is not None:
            self._take_up(found)
            self.saved = found.path
            self.display.say(f"continuing {self.run.path} at step {self.state.step}")
            if changed := self.run.changes_since_start():
                self.display.say(f"note: it was begun with {changed}; the bits may differ")
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            checkpoint.tidy(self.run.checkpoints)
            self.run.forget_after(self.state.step)
        self.display.advance(self.state.step)
        self.accelerator.init_trackers(
            "tensorboard", init_kwargs={"tensorboard": {"purge_step": self.state.step + 1}}
        )

    def _take_up(self, found: checkpoint.Checkpoint) -> None:
        state, tensors = dict(found.state), found.tensors
        processes = state.pop("processes")
        if processes != self.accelerator.num_processes:
            raise RequestError(
                f"{self.run.path} is a run of {processes} process(es): go on with as many"
            )
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state.pop("scaler"))
        self.state = TrainingState(**state)
        mine = self.accelerator.process_index
        self.module.load_state_dict(tensors["model"])
        self.loss.load_state_dict({name: rows[mine] for name, rows in tensors["loss"].items()})
        self.teacher.load_state_dict(tensors["teacher"])
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict(
            {"state": _nested(tensors["optimizer"]), "param_groups": groups}
        )
        self.average = {
            name: tensor.to(self.accelerator.device) for name, tensor in tensors["average"].items()
        }

    def finish(self, test: bool) -> dict[str, Any]:
        """Score the selected model, on the test split for the first and only time."""
        if self.average:
            self._select(self.average)
        model = load_model(self.run).to(self.accelerator.device)
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
                processes=self.accelerator.num_processes,
            ),
            "steps": self.state.step,
            "selected_step": self.state.step if self.average else self.state.best_step,
            "seconds": round(self.state.seconds, 3),
            "peak_memory": peak_memory(),
            **found["valid"].about,
        }
        if self.accelerator.is_main_process:
            self.run.finish(results)
        # All leave together. A process that ends while gloo still frees the tensors of its last
        # collective can wait for ever (PyTorch 2.13).
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()
        return results


def peak_memory() -> int:
    """The most memory this process has held so far, in bytes: of the GPU if it works on one."""
    if not on_cpu():
        return int(torch.accelerator.max_memory_allocated())
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes if sys.platform == "darwin" else kilobytes * 1024


def on_cpu() -> bool:
    """Whether there is nothing better; accelerate wants to be told for many processes."""
    return not torch.accelerator.is_available()


def _accelerator(recipe: Recipe, run: RunDirectory) -> Accelerator:
    """Devices, processes and precision, as the launcher and the recipe say."""
    if on_cpu() and recipe.train.precision == "fp16":
        raise RequestError("train.precision: fp16 needs a GPU; bf16 works on a CPU")
    if on_cpu() and recipe.train.sync_batchnorm:
        raise RequestError("train.sync_batchnorm needs GPUs")
    return Accelerator(
        cpu=on_cpu(),
        mixed_precision=recipe.train.precision,
        log_with="tensorboard" if find_spec("tensorboard") else None,
        project_config=ProjectConfiguration(str(run.path), logging_dir=str(run.path)),
    )


def _tell(loss: nn.Module, event: str) -> None:
    """Call the loss's ``step()`` or ``end_epoch()``, if it has one."""
    hook: Callable[[], None] | None = getattr(loss, event, None)
    if hook is not None:
        hook()


def _divides(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def _one_ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, each made while the one before is in use."""
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
