"""mixup with LABO: mixed labels are class probabilities, which the losses accept as targets.

    $ python examples/mixup.py
    on the last 597 images      accuracy     NLL  confidence
    base, no mixup                0.9330  0.2610      0.9482
    base, mixup 0.2               0.9213  0.2743      0.8846
    labo, no mixup                0.9414  0.6110      0.5905
    labo, mixup 0.2               0.9296  0.6160      0.5919

One run each. For this small network mixup did not help with either loss.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import labo
from labo.lab.images.digits import read_digits


def mix(x: Tensor, y: Tensor, strength: float) -> tuple[Tensor, Tensor]:
    """Images and labels, each mixed with another one, with a weight from Beta(s, s)."""
    share = torch.distributions.Beta(strength, strength).sample()
    other = torch.randperm(len(y))
    labels = nn.functional.one_hot(y, 10).to(x.dtype)
    return torch.lerp(x, x[other], share), torch.lerp(labels, labels[other], share)


def train(loss_fn: nn.Module, x: Tensor, y: Tensor, epochs: int, strength: float) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(y)).split(64):
            inputs, target = x[batch], y[batch]
            if strength:
                inputs, target = mix(inputs, target, strength)
            optimizer.zero_grad()
            loss_fn(model(inputs), target).backward()
            optimizer.step()
    return model.eval()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    epochs = parser.parse_args(arguments).epochs

    x, y = read_digits()
    print(f"{'on the last 597 images':26}{'accuracy':>10}{'NLL':>8}{'confidence':>12}")
    for name in ("base", "labo"):
        for strength in (0.0, 0.2):
            model = train(labo.LOSSES[name](), x[:1200], y[:1200], epochs, strength)
            with torch.no_grad():
                logits = model(x[1200:])
            accuracy = (logits.argmax(-1) == y[1200:]).float().mean()
            nll = nn.functional.cross_entropy(logits, y[1200:])
            confidence = logits.softmax(-1).amax(-1).mean()
            title = f"{name}, mixup {strength}" if strength else f"{name}, no mixup"
            print(f"{title:26}{accuracy:10.4f}{nll:8.4f}{confidence:12.4f}")


if __name__ == "__main__":
    main()
