"""Distillation: a student trained on 100 images, with a teacher trained on 1200.

    $ python examples/distillation.py
    on the last 597 images              accuracy     NLL
    teacher, 1200 images                  0.9196  0.2692
    student, 100 images, labels only      0.8174  0.6465
    student, 100 images, distilled        0.9062  0.3094

The student is trained on the same 100 images in both cases. With all 1200 images the teacher did
not improve it.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import labo
from labo.lab.images.digits import read_digits


def train(x: Tensor, y: Tensor, steps: int, teacher: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    plain, distill = labo.CrossEntropyLoss(), labo.DistillationLoss(alpha=0.9, tau=4.0)
    for _ in range(steps):
        batch = torch.randint(len(y), (64,))
        logits = model(x[batch])
        if teacher is None:
            loss = plain(logits, y[batch])
        else:
            with torch.no_grad():
                teacher_logits = teacher(x[batch])
            loss = distill(logits, y[batch], teacher_logits)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    steps = parser.parse_args(arguments).steps

    x, y = read_digits()
    teacher = train(x[:1200], y[:1200], steps)
    models = {
        "teacher, 1200 images": teacher,
        "student, 100 images, labels only": train(x[:100], y[:100], steps),
        "student, 100 images, distilled": train(x[:100], y[:100], steps, teacher),
    }
    print(f"{'on the last 597 images':34}{'accuracy':>10}{'NLL':>8}")
    for name, model in models.items():
        with torch.no_grad():
            logits = model(x[1200:])
        accuracy = (logits.argmax(-1) == y[1200:]).float().mean()
        print(f"{name:34}{accuracy:10.4f}{nn.functional.cross_entropy(logits, y[1200:]):8.4f}")


if __name__ == "__main__":
    main()
