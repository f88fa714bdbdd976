"""Training with the lab compared with the Hugging Face Trainer, and with a plain loop.

All contenders of a race get the same batches in the same process.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from . import huggingface

Turn = Callable[[int], float]  # steps -> seconds


class Size(NamedTuple):
    """Dimensions of a Llama and of its batches; of a ViT and of its batches; steps and turns."""

    vocabulary: int
    width: int
    layers: int
    tokens: int
    vit_layers: int
    images: int
    steps: int
    turns: int


FULL = Size(32768, 256, 2, 1024, 4, 32, steps=1, turns=9)
SMOKE = Size(2048, 16, 1, 256, 1, 8, steps=1, turns=1)


def _lab(recipe: Any, folder: Path) -> tuple[Any, Turn]:
    """The task of a recipe, and a turn of ``labo train``: batches, loss, backward, update."""
    from labo.lab.run.directory import RunDirectory
    from labo.lab.train import Trainer

    trainer = Trainer(recipe, RunDirectory(folder))
    upcoming = trainer.upcoming()

    def turn(steps: int) -> float:
        began = time.perf_counter()
        for batches, index in itertools.islice(upcoming, steps):
            trainer.update(batches, index)
            trainer.state.counters.step += 1
        return time.perf_counter() - began

    return trainer.task, turn


# ------------------------------------------------------------------ a language model


@contextmanager
def language_model(size: Size) -> Iterator[dict[str, Turn]]:
    """A Llama on the manual of Python, with more output rows than the tokenizer has types."""
    from transformers.utils import logging

    from labo.lab.language_modeling.manual import manual_data
    from labo.lab.recipes import load_recipe

    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as place:
        start = Path(place) / "start"
        dimensions = huggingface.Size(1, 256, size.width, size.layers, size.vocabulary)
        huggingface.llama(dimensions).save_pretrained(start)
        settings = ["model.preset=null", f"model.pretrained={start}", "model.dropout=0"]
        settings += ["data.block=256", f"train.batch_tokens={size.tokens}", "optim.lr=1e-4"]
        plain = load_recipe("lm-manual", [*settings, "method=base"])
        shutil.copytree(manual_data().path / "tokenizer", start, dirs_exist_ok=True)
        task, ours = _lab(plain, Path(place) / "base")
        _, labo = _lab(load_recipe("lm-manual", [*settings, "method=labo"]), Path(place) / "labo")
        yield {
            "labo train CE": ours,
            "labo train LABO": labo,
            "Trainer CE": _huggingface(start, task, Path(place) / "trainer"),
        }


def _huggingface(start: Path, task: Any, out: Path) -> Turn:
    """Turns of the Trainer of transformers, on the first batches of a task."""
    from transformers import (
        AutoModelForCausalLM,
        PrinterCallback,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    class Clock(TrainerCallback):  # type: ignore[misc]
        began = ended = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            self.began = self.began or time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            self.ended = time.perf_counter()

    def batch(position: int) -> dict[str, torch.Tensor]:
        found = task.batch(task.global_batch(0, position), 0)
        labels = F.pad(found.target[:, :-1], (1, 0), value=-100)  # the model shifts them back
        inputs = found.inputs
        return {"input_ids": inputs.ids, "position_ids": inputs.positions, "labels": labels}

    model = AutoModelForCausalLM.from_pretrained(start)
    first = 0

    def turn(steps: int) -> float:
        nonlocal first
        clock = Clock()
        arguments = TrainingArguments(
            output_dir=str(out),
            per_device_train_batch_size=1,  # an item is a whole batch
            max_steps=steps,
            learning_rate=1e-4,
            weight_decay=0.1,
            max_grad_norm=1.0,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        batches = [batch(first + number) for number in range(steps)]
        first = (first + steps) % (task.steps_per_epoch - steps)
        trainer = Trainer(
            model,
            arguments,
            train_dataset=batches,
            data_collator=lambda items: items[0],
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return clock.ended - clock.began

    return turn


# ------------------------------------------------------------------ a vision transformer


@contextmanager
def vision_transformer(size: Size) -> Iterator[dict[str, Turn]]:
    """ViT-Lite on images of 32 x 32 pixels, with label smoothing; beside a loop without the lab."""
    from labo.lab.recipes import load_recipe

    settings = ["model.name=vit-lite", "model.image_size=32", f"model.layers={size.vit_layers}"]
    settings += [f"train.batch_size={size.images}", "method=ls", "optim.name=adamw"]
    settings += ["optim.lr=1e-4", "optim.weight_decay=0", "optim.clip_norm=1", "train.epochs=100"]
    with tempfile.TemporaryDirectory() as place:
        task, ours = _lab(load_recipe("digits", settings), Path(place) / "vit")
        yield {"labo train LS": ours, "plain loop LS": _plain_loop(task)}


def _plain_loop(task: Any) -> Turn:
    model = task.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    positions = itertools.cycle(range(task.steps_per_epoch))

    def turn(steps: int) -> float:
        model.train()
        began = time.perf_counter()
        for position in itertools.islice(positions, steps):
            batch = task.batch(task.global_batch(0, position), 0)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch.inputs.to("cpu")), batch.target, label_smoothing=0.1)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return time.perf_counter() - began

    return turn
