"""Draws docs/assets/idea.svg: one image, and the label that three losses train it towards.

    python -m benchmarks.idea [IMAGE]

A small network is trained on handwritten digits with LABO. The picture shows, for one training
image, its prediction and the labels of cross entropy, label smoothing and LABO.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import labo
from labo import smoothing
from labo.lab.images.digits import read_digits

OUT = Path(__file__).parent.parent / "docs" / "assets" / "idea.svg"
IMAGE = 821
LABEL, GUESS = "#4477aa", "#999999"


def predict(x: Tensor, y: Tensor) -> Tensor:
    """(N, K) logits of a network after ten epochs with LABO."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer, loss_fn = torch.optim.Adam(model.parameters(), lr=3e-3), labo.LABOLoss(tau=1.25)
    for _ in range(10):
        for batch in torch.randperm(len(y)).split(64):
            optimizer.zero_grad()
            loss_fn(model(x[batch]), y[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        logits: Tensor = model(x)
    return logits


def draw(image: Tensor, target: int, logits: Tensor) -> str:
    """The picture as SVG. Its background is part of it: it looks the same on light and dark pages.

    Each row has a bar per class, with values of 0.005 or more above them.
    """
    label = torch.tensor(target)
    alpha = float(smoothing.adaptive_alpha(logits))
    uniform, tempered = smoothing.uniform(logits), smoothing.tempered(logits, 1.25)
    rows = [
        ("prediction", "output p of the model", logits.softmax(-1)),
        ("cross entropy", "one-hot label", smoothing.smoothed_target(label, uniform, 0.0)),
        (
            "label smoothing",
            "mass 0.1, spread evenly",
            smoothing.smoothed_target(label, uniform, 0.1),
        ),
        (
            "LABO",
            f"mass {alpha:.2f}, spread as softmax(z / 1.25)",
            smoothing.smoothed_target(label, tempered, alpha),
        ),
    ]
    picture = io.BytesIO()
    look = {"svg.fonttype": "none", "svg.hashsalt": "labo", "axes.edgecolor": "#bbb"}
    with matplotlib.rc_context(look):
        drawing = Figure(figsize=(9.8, 4.2), edgecolor="#bbb", linewidth=2)
        pixels = drawing.add_axes((0.03, 0.5, 0.18, 0.42))
        pixels.pcolormesh(image.view(8, 8).flipud(), cmap="Greys", vmin=0, vmax=1, edgecolor="face")
        pixels.set(xticks=[], yticks=[], aspect="equal")
        pixels.set_xlabel(f"image with label {target}", color="#666", labelpad=8)
        for place, (title, note, values) in enumerate(rows):
            axes = drawing.add_axes((0.41, 0.77 - 0.225 * place, 0.57, 0.17))
            axes.spines[["left", "right", "top"]].set_visible(False)
            axes.set(xlim=(-0.5, 9.5), ylim=(0, 1.2), yticks=[])
            axes.tick_params(length=0, labelbottom=place == len(rows) - 1)
            axes.set_xticks(range(10))
            bars = axes.bar(range(10), values.tolist(), 0.6, color=LABEL if place else GUESS)
            shown = [f"{value:.2f}" if value >= 0.005 else "" for value in values.tolist()]
            axes.bar_label(bars, shown, padding=1, size=9)[target].set_fontweight("bold")
            axes.text(-0.9, 0.45, title, ha="right", size=11)
            axes.text(-0.9, 0.05, note, ha="right", size=9, color="#666")
        axes.get_xticklabels()[target].set_fontweight("bold")
        drawing.savefig(picture, format="svg", metadata={"Date": None})
    title = f"A handwritten {target} and its label under three losses"
    svg = picture.getvalue().decode()
    return svg.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)


def main(arguments: list[str]) -> None:
    x, y = (values[:1200] for values in read_digits())
    chosen = int(arguments[0]) if arguments else IMAGE
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(draw(x[chosen], int(y[chosen]), predict(x, y)[chosen]), encoding="utf-8")
    print(f"wrote {OUT}")


if __name__ == "__main__":
    main(sys.argv[1:])
