"""Draws docs/assets/labels.svg: the label that each method pulls one prediction towards.

    python tools/label_figure.py

The label is :func:`labo.label_of`, Q = p - dL/dz, of a sample with four classes. Methods with a
teacher have the one that is drawn beside the prediction.
"""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import labo

OUT = Path(__file__).parent.parent / "docs" / "assets" / "labels.svg"
LOGITS = torch.tensor([2.0, 1.0, 0.1, -1.0], dtype=torch.float64)
TEACHER = torch.tensor([3.0, 1.0, 0.2, -0.5], dtype=torch.float64)
TARGET = torch.tensor(0)
COLUMNS = 5
LABEL, BELOW, GUESS = "#4477aa", "#cc6677", "#999999"


def kd(divergence: str) -> nn.Module:
    return labo.DistillationLoss(alpha=1.0, tau=1.0, divergence=divergence)


# The title of a cell, and its loss. Losses that need a table, a batch or a model are left out.
METHODS: dict[str, nn.Module] = {
    "base": labo.CrossEntropyLoss(),
    "ls, alpha 0.1": labo.LabelSmoothingLoss(alpha=0.1),
    "labo, tau 1.25": labo.LABOLoss(tau=1.25),
    "als": labo.AdaptiveSmoothingLoss(),
    "cp, beta 0.5": labo.ConfidencePenaltyLoss(beta=0.5),
    "ger": labo.GeneralizedEntropyLoss(),
    "maxsup": labo.MaxSuppressionLoss(),
    "mbls, margin 1": labo.MarginSmoothingLoss(margin=1.0),
    "acls, margin 1": labo.ACLSLoss(margin=1.0),
    "zipf, lambda 0.5": labo.ZipfSmoothingLoss(lam=0.5),
    "fl, gamma 2": labo.FocalLoss(gamma=2.0),
    "afl": labo.AntiFocalLoss(),
    "poly": labo.Poly1Loss(),
    "logitnorm, tau 1": labo.LogitNormLoss(tau=1.0),
    "dft": labo.DFTLoss(),
    "eaft": labo.EAFTLoss(),
    "gce, gamma 0.7": labo.GeneralizedCrossEntropyLoss(),
    "gem": labo.GEMLoss(),
    "tf-reg": labo.TFRegLoss(),
    "als-past": labo.PriorSmoothingLoss(),
    "kd": kd("forward"),
    "kd, reverse": kd("reverse"),
    "kd, jsd": kd("jsd"),
    "kd, skew": kd("skew"),
    "dkd": labo.DecoupledDistillationLoss(tau=1.0, beta=2.0, warmup_epochs=0),
}


def labels() -> dict[str, Tensor]:
    """The label of each method, (4,)."""
    found = {}
    for title, loss in METHODS.items():
        inputs = () if loss.teacher_argument is None else (TEACHER,)
        found[title] = labo.label_of(loss, LOGITS, TARGET, *inputs)
    return found


def draw() -> str:
    """The picture as SVG. A negative mass goes below the axis."""
    cells = [
        ("prediction p", LOGITS.softmax(-1), GUESS),
        ("teacher", TEACHER.softmax(-1), GUESS),
        *((title, values, LABEL) for title, values in labels().items()),
    ]
    rows = -(-len(cells) // COLUMNS)
    picture = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "labo", "font.size": 9}):
        drawing = Figure(figsize=(1.45 * COLUMNS, 1.1 * rows), layout="tight")
        grid = drawing.subplots(rows, COLUMNS, sharey=True).flatten()
        for axes in grid:
            axes.set_axis_off()
            axes.set_ylim(-0.5, 1.8)
        for axes, (title, values, color) in zip(grid, cells, strict=False):
            masses = values.tolist()
            colors = [BELOW if mass < 0 else color for mass in masses]
            bars = axes.bar(range(len(masses)), masses, 0.7, color=colors)
            axes.bar_label(bars, [f"{mass:.2f}" for mass in masses], padding=2, fontsize=7)
            axes.axhline(0, color="#bbb", linewidth=0.8)
            axes.set_title(title, loc="left", fontsize=9, pad=8)
        drawing.savefig(picture, format="svg", metadata={"Date": None})
    return picture.getvalue().decode()


if __name__ == "__main__":
    OUT.write_text(draw(), encoding="utf-8")
    print(f"wrote {OUT}")
