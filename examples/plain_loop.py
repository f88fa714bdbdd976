"""A plain PyTorch loop with label smoothing and then LABO. The lines marked + are new.

    $ python examples/plain_loop.py
    accuracy 0.9280  mean confidence 0.5837  NLL 0.6367

Evaluate with the NLL and not with the training loss: the value of LABO contains a KL term. Low
confidence is intended; examples/calibration.py corrects it by temperature scaling.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import labo  # +
from labo.lab.images.digits import read_digits


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    epochs = parser.parse_args(arguments).epochs

    x, y = read_digits()
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(x[:1200], y[:1200]), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    loss_fn = labo.Warmup(  # + was: nn.CrossEntropyLoss(label_smoothing=0.1)
        labo.LabelSmoothingLoss(alpha=0.1),  # +
        labo.LABOLoss(tau=1.25),  # +
        steps=100,  # +
    )  # +
    for _ in range(epochs):
        for inputs, target in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), target)
            loss.backward()
            optimizer.step()
            loss_fn.step()  # +

    with torch.no_grad():
        logits = model(x[1200:])
    accuracy = (logits.argmax(-1) == y[1200:]).float().mean()
    confidence = logits.softmax(-1).amax(-1).mean()
    nll = nn.functional.cross_entropy(logits, y[1200:])  # + and not loss_fn
    print(f"accuracy {accuracy:.4f}  mean confidence {confidence:.4f}  NLL {nll:.4f}")


if __name__ == "__main__":
    main()
