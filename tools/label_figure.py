"""Draws docs/assets/labels.svg: the label that each method pulls one prediction towards.

    python tools/label_figure.py

The label is :func:`labo.label_of`, Q = p - dL/dz, of a sample with four classes. Methods with a
teacher have the one that is drawn beside the prediction.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import torch
from torch import Tensor, nn

import labo

OUT = Path(__file__).parent.parent / "docs" / "assets" / "labels.svg"
LOGITS = torch.tensor([2.0, 1.0, 0.1, -1.0], dtype=torch.float64)
TEACHER = torch.tensor([3.0, 1.0, 0.2, -0.5], dtype=torch.float64)
TARGET = torch.tensor(0)
COLUMNS, CELL, ROW, BAR, TALL = 5, 142, 104, 26, 46  # sizes in pixels
STYLE = (
    "<style>text{fill:#222}.soft{fill:#666}.axis{stroke:#bbb}.label{fill:#4477aa}"
    ".below{fill:#cc6677}.guess{fill:#999}.paper{fill:#fff;stroke:#bbb}</style>"
)


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


def cell(number: int, title: str, values: Tensor, kind: str) -> list[str]:
    """The bars of one distribution; a negative mass goes below the axis."""
    left, base = 14 + CELL * (number % COLUMNS), 70 + ROW * (number // COLUMNS)
    parts = [
        f'<text x="{left}" y="{base - TALL - 8}">{escape(title)}</text>',
        f'<line class="axis" x1="{left}" x2="{left + 4 * BAR}" y1="{base}" y2="{base}"/>',
    ]
    for k, value in enumerate(values.tolist()):
        x, height = left + BAR * k, TALL * min(abs(value), 1.0)
        top, style = (base - height, kind) if value >= 0 else (base, "below")
        parts.append(
            f'<rect class="{style}" x="{x + 4}" y="{top:.1f}" width="{BAR - 8}" '
            f'height="{height:.1f}"/>'
        )
        parts.append(
            f'<text class="soft" x="{x + BAR // 2}" y="{base + 22}" text-anchor="middle" '
            f'font-size="9">{value:.2f}</text>'
        )
    return parts


def draw() -> str:
    """The picture as SVG."""
    cells = [
        ("prediction p", LOGITS.softmax(-1), "guess"),
        ("teacher", TEACHER.softmax(-1), "guess"),
        *((title, values, "label") for title, values in labels().items()),
    ]
    rows = -(-len(cells) // COLUMNS)
    width, height = 20 + CELL * COLUMNS, 4 + ROW * rows
    title = "The label of every method for one prediction"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{title}" font-family="sans-serif" font-size="12">',
        STYLE,
        f'<rect class="paper" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
    ]
    for number, (name, values, kind) in enumerate(cells):
        parts += cell(number, name, values, kind)
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    OUT.write_text(draw(), encoding="utf-8")
    print(f"wrote {OUT}")
