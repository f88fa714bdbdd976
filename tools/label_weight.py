"""How much of the label each method keeps during training, and what follows from it.

    python tools/label_weight.py FOLDER       # the idx files of Fashion-MNIST; about 10 minutes

A 784-512-512-10 network learns 5,000 images of Fashion-MNIST for 40 epochs, with the split and the
recipe of ``fashion-mnist-5k``. Every epoch is a row of ``results/label-weight.csv``: the mean label
weight (1 - alpha), the mean norm of the gradient, the learning rate, the integral of their product
over the steps, and scores. docs/why.md shows them.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import labo
from labo.lab.images.networks import fashion_mlp
from labo.lab.images.sources import load_images
from labo.lab.images.splits import ImageSplit

OUT = Path(__file__).parents[1] / "results" / "label-weight.csv"
EPOCHS, BATCH, SEEDS = 40, 128, 3


@dataclass(frozen=True)
class Setting:
    """A loss, the weight that it leaves to the label, and a learning rate."""

    method: str
    lr: float
    loss: Callable[[Tensor, Tensor], Tensor]
    weight: Callable[[Tensor], float]


def _labo(lr: float, *, rho: float = 0.5, tau: float = 1.25, rescale: bool = False) -> Setting:
    loss = labo.LABOLoss(tau=tau, rho=rho)

    def weight(logits: Tensor) -> float:
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        return float(rho * entropy.mean() / math.log(logits.shape[-1]))

    def rescaled(logits: Tensor, target: Tensor) -> Tensor:
        return loss(logits, target) / weight(logits.detach())

    name = f"labo rho={rho:g} tau={tau:g}"
    if rescale:
        return Setting(f"{name} rescaled", lr, rescaled, lambda logits: 1.0)
    return Setting(name, lr, loss, weight)


SETTINGS = (
    Setting("base", 0.1, labo.CrossEntropyLoss(), lambda logits: 1.0),
    Setting("ls alpha=0.1", 0.1, labo.LabelSmoothingLoss(0.1), lambda logits: 0.9),
    _labo(0.1),
    _labo(0.4),
    _labo(0.2, rho=1.0),
    _labo(0.4, tau=1.05),
    _labo(0.1, rescale=True),
)

Data = tuple[Tensor, Tensor]  # (N, 1, 28, 28) float32 and (N,) int64


def epochs(setting: Setting, seed: int, train: Data, valid: Data) -> Iterator[dict[str, object]]:
    """Train, and yield a row per epoch."""
    torch.manual_seed(seed)
    model = fashion_mlp(10)
    optimizer = torch.optim.SGD(model.parameters(), setting.lr, momentum=0.9, weight_decay=5e-4)
    images, target = train
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, EPOCHS * -(-len(target) // BATCH)
    )
    integral = 0.0
    for epoch in range(1, EPOCHS + 1):
        weights, norms = [], []
        for index in torch.randperm(len(target)).split(BATCH):
            logits = model(images[index])
            optimizer.zero_grad()
            setting.loss(logits, target[index]).backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norms.append(float(nn.utils.get_total_norm(gradients)))
            weights.append(setting.weight(logits.detach()))
            integral += schedule.get_last_lr()[0] * weights[-1]
            optimizer.step()
            schedule.step()
        row = {
            "method": setting.method,
            "lr": setting.lr,
            "seed": seed,
            "epoch": epoch,
            "label_weight": statistics.mean(weights),
            "gradient_norm": statistics.mean(norms),
            "integral": integral,
            **_scores(model, train, "train"),
            **_scores(model, valid, "valid"),
        }
        yield {
            key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()
        }


@torch.no_grad()
def _scores(model: nn.Module, data: Data, split: str) -> dict[str, float]:
    logits = model(data[0])
    accuracy = (logits.argmax(-1) == data[1]).double().mean()
    nll = nn.functional.cross_entropy(logits, data[1])
    return {f"{split}_accuracy": float(accuracy), f"{split}_nll": float(nll)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write results/label-weight.csv.")
    parser.add_argument("folder", help="the folder of the idx files of Fashion-MNIST")
    folder = parser.parse_args().folder
    source = load_images("fashion-mnist", folder, holdout=0.08333, holdout_seed=0, train_size=5000)

    def data(split: ImageSplit) -> Data:
        assert isinstance(split.images, Tensor)
        return (split.images / 255 - source.mean[0]) / source.std[0], split.labels

    with OUT.open("w", encoding="utf-8", newline="") as file:
        writer = None
        for setting in SETTINGS:
            for seed in range(SEEDS):
                for row in epochs(setting, seed, data(source.train), data(source.valid)):
                    writer = writer or csv.DictWriter(file, row, lineterminator="\n")
                    if file.tell() == 0:
                        writer.writeheader()
                    writer.writerow(row)
                file.flush()


if __name__ == "__main__":
    main()
