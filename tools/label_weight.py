"""How much of the label each method keeps during training, and what follows from it.

    python tools/label_weight.py FOLDER       # the idx files of Fashion-MNIST; half an hour, 1 core

A 784-512-512-10 network learns 5,000 images of Fashion-MNIST with SGD, momentum 0.9, weight decay
5e-4, batches of 128 and a cosine schedule, as in the recipe ``fashion-mnist-5k``. Four files:

``results/label-weight.csv`` has a row per epoch of 40: the mean label weight (1 - alpha), the mean
norm of the gradient, the integral of learning rate times label weight over the steps, and scores.

``results/budget.csv`` has a row per run: method, number of epochs, learning rate, seed, scores of
the last model. ``results/budget-adam.csv`` has the same for AdamW, ``results/budget-batch.csv`` for
batches of 1,000. docs/why.md shows them all. Runs that are in the files are not repeated.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

import labo
from labo.lab.images.networks import fashion_mlp
from labo.lab.images.sources import load_images
from labo.lab.images.splits import ImageSplit

RESULTS = Path(__file__).parents[1] / "results"
BATCH, LARGE_BATCH, SEEDS = 128, 1000, 3
BUDGETS, RATES = (1, 3, 10, 30), (0.05, 0.1, 0.2, 0.4, 0.8)
ADAM_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
LARGE_BATCH_RATES = (0.1, 0.2, 0.4, 0.8, 1.6)

Data = tuple[Tensor, Tensor]  # (N, 1, 28, 28) float32 and (N,) int64
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Setting:
    """A loss, the weight it leaves to the label, learning rate, warm-up, optimizer, batch size.

    ``warmup`` is the share of the steps that use label smoothing before the loss itself.
    """

    method: str
    loss: Loss
    weight: Callable[[Tensor], float]
    lr: float = 0.1
    warmup: float = 0.0
    adam: bool = False
    batch: int = BATCH


def _labo(*, rho: float = 0.5, tau: float = 1.25, rescale: bool = False) -> Setting:
    loss = labo.LABOLoss(tau=tau, rho=rho)

    def weight(logits: Tensor) -> float:
        return 1 - float(labo.smoothing.adaptive_alpha(logits, rho).mean())

    def rescaled(logits: Tensor, target: Tensor) -> Tensor:
        return loss(logits, target) / weight(logits.detach())

    name = f"labo rho={rho:g} tau={tau:g}"
    if rescale:
        return Setting(f"{name} rescaled", rescaled, lambda logits: 1.0)
    return Setting(name, loss, weight)


SMOOTHING = labo.LabelSmoothingLoss(alpha=0.1)
BASE = Setting("base", labo.CrossEntropyLoss(), lambda logits: 1.0)
LS = Setting("ls alpha=0.1", SMOOTHING, lambda logits: 0.9)
LABO, LABO_RHO, LABO_TAU = _labo(), _labo(rho=1.0), _labo(tau=1.05)
RESCALED = _labo(rescale=True)


# File -> its settings with their numbers of epochs.
FILES = {
    "label-weight.csv": [
        *((setting, 40) for setting in (BASE, LS, LABO, replace(LABO, lr=0.4))),
        (replace(LABO_RHO, lr=0.2), 40),
        (replace(LABO_TAU, lr=0.4), 40),
        (RESCALED, 40),
    ],
    "budget.csv": [
        *(
            (replace(method, lr=lr), epochs)
            for method, epochs, lr in product((BASE, LS, LABO, LABO_RHO, RESCALED), BUDGETS, RATES)
        ),
        *((replace(LABO, lr=0.4, warmup=w), epochs) for w, epochs in product((0.1, 0.5), (3, 10))),
    ],
    "budget-adam.csv": [
        (replace(method, lr=lr, adam=True), BUDGETS[-1])
        for method, lr in product((BASE, LS, LABO), ADAM_RATES)
    ],
    "budget-batch.csv": [
        (replace(method, lr=lr, batch=LARGE_BATCH), BUDGETS[-1])
        for method, lr in product((BASE, LS, LABO, RESCALED), LARGE_BATCH_RATES)
    ],
}


def _optimizer(setting: Setting, model: nn.Module) -> torch.optim.Optimizer:
    if setting.adam:
        return torch.optim.AdamW(model.parameters(), setting.lr, weight_decay=0.01)
    return torch.optim.SGD(model.parameters(), setting.lr, momentum=0.9, weight_decay=5e-4)


def train(
    setting: Setting, seed: int, epochs: int, data: Mapping[str, Data], every_epoch: bool
) -> Iterator[dict[str, object]]:
    """Train, and yield a row per epoch or one at the end."""
    torch.manual_seed(seed)
    model = fashion_mlp(10)
    optimizer = _optimizer(setting, model)
    images, target = data["train"]
    steps = epochs * -(-len(target) // setting.batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    integral, step = 0.0, 0
    for epoch in range(1, epochs + 1):
        weights, norms = [], []
        for index in torch.randperm(len(target)).split(setting.batch):
            loss = SMOOTHING if step < setting.warmup * steps else setting.loss
            logits = model(images[index])
            optimizer.zero_grad()
            loss(logits, target[index]).backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norms.append(float(nn.utils.get_total_norm(gradients)))
            weights.append(setting.weight(logits.detach()))
            integral += float(schedule.get_last_lr()[0]) * weights[-1]
            optimizer.step()
            schedule.step()
            step += 1
        if not (every_epoch or epoch == epochs):
            continue
        row = {
            "method": setting.method,
            "epochs": epochs,
            "lr": setting.lr,
            "warmup": setting.warmup,
            "seed": seed,
            "epoch": epoch,
            "label_weight": statistics.mean(weights),
            "gradient_norm": statistics.mean(norms),
            "integral": integral,
            **{key: value for split in data for key, value in _scores(model, data, split).items()},
        }
        yield {key: f"{x:.6g}" if isinstance(x, float) else x for key, x in row.items()}


@torch.no_grad()
def _scores(model: nn.Module, data: Mapping[str, Data], split: str) -> dict[str, float]:
    images, target = data[split]
    logits = model(images)
    accuracy = (logits.argmax(-1) == target).double().mean()
    nll = nn.functional.cross_entropy(logits, target)
    return {f"{split}_accuracy": float(accuracy), f"{split}_nll": float(nll)}


def _write(
    name: str, runs: Iterable[tuple[Setting, int]], data: Mapping[str, Data], every_epoch: bool
) -> None:
    """Add the runs that a file does not have yet, each with all of its rows at once."""
    path = RESULTS / name
    done = set()
    if path.is_file():
        with path.open(encoding="utf-8", newline="") as lines:
            done = {tuple(row[key] for key in _RUN) for row in csv.DictReader(lines)}
    with path.open("a", encoding="utf-8", newline="") as file:
        for (setting, epochs), seed in product(runs, range(SEEDS)):
            run = (setting.method, epochs, f"{setting.lr:g}", f"{setting.warmup:g}", seed)
            if tuple(map(str, run)) in done:
                continue
            rows = list(train(setting, seed, epochs, data, every_epoch))
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            if file.tell() == 0:
                writer.writeheader()
            writer.writerows(rows)
            file.flush()


_RUN = ("method", "epochs", "lr", "warmup", "seed")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write results/label-weight.csv and budget.csv.")
    parser.add_argument("folder", help="the folder of the idx files of Fashion-MNIST")
    folder = parser.parse_args().folder
    source = load_images("fashion-mnist", folder, holdout=0.08333, train_size=5000)

    def scaled(split: ImageSplit) -> Data:
        assert isinstance(split.images, Tensor)
        return (split.images / 255 - source.mean[0]) / source.std[0], split.labels

    splits = {name: scaled(getattr(source, name)) for name in ("train", "valid", "test")}
    for name, runs in FILES.items():
        _write(name, runs, splits, every_epoch=name == "label-weight.csv")


if __name__ == "__main__":
    main()
