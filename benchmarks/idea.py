"""Draws docs/assets/idea.svg: one image, and the label that three losses train it towards.

    python -m benchmarks.idea [IMAGE]

A small network is trained on handwritten digits with LABO. The picture shows, for one training
image, its prediction and the labels of cross entropy, label smoothing and LABO.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

import torch
from torch import Tensor, nn

import labo
from labo import smoothing
from labo.lab.images.digits import read_digits

OUT = Path(__file__).parent.parent / "docs" / "assets" / "idea.svg"
IMAGE = 821
WIDTH, HEIGHT = 710, 306
LEFT, TOP, CELL = 290, 20, 16  # left edge of the bars, top margin, size of a pixel of the image
ROW, BAR, TALL = 70, 40, 40  # height of a row, distance between bars, height of a bar of 1.0
# The background is part of the picture: it looks the same on light and dark pages.
STYLE = (
    "<style>text{fill:#222}.soft{fill:#666}.axis{stroke:#bbb}.label{fill:#4477aa}"
    ".guess{fill:#999}.true{font-weight:bold}.paper{fill:#fff;stroke:#bbb}</style>"
)


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


def bars(row: int, title: str, note: str, values: Tensor, kind: str, target: int) -> list[str]:
    """A row of bars, one per class, with values of 0.005 or more above them."""
    base = TOP + ROW * row + TALL + 4
    parts = [
        f'<text x="{LEFT - 12}" y="{base - 18}" text-anchor="end">{escape(title)}</text>',
        f'<text class="soft" x="{LEFT - 12}" y="{base - 3}" text-anchor="end" font-size="11">'
        f"{escape(note)}</text>",
        f'<line class="axis" x1="{LEFT}" x2="{LEFT + 10 * BAR}" y1="{base}" y2="{base}"/>',
    ]
    for k, value in enumerate(values.tolist()):
        x, height = LEFT + BAR * k, TALL * value
        parts.append(
            f'<rect class="{kind}" x="{x + 8}" y="{base - height:.1f}" width="{BAR - 16}" '
            f'height="{height:.1f}"/>'
        )
        if value >= 0.005:
            weight = "true" if k == target else "soft"
            parts.append(
                f'<text class="{weight}" x="{x + BAR // 2}" y="{base - height - 3:.1f}" '
                f'text-anchor="middle" font-size="10">{value:.2f}</text>'
            )
    return parts


def draw(image: Tensor, target: int, logits: Tensor) -> str:
    """The picture as SVG."""
    label = torch.tensor(target)
    alpha = float(smoothing.adaptive_alpha(logits))
    tempered = smoothing.tempered(logits, 1.25)
    rows = [
        ("prediction", "output p of the model", logits.softmax(-1), "guess"),
        ("cross entropy", "one-hot label", nn.functional.one_hot(label, 10), "label"),
        (
            "label smoothing",
            "mass 0.1, spread evenly",
            smoothing.smoothed_target(label, smoothing.uniform(logits), 0.1),
            "label",
        ),
        (
            "LABO",
            f"mass {alpha:.2f}, spread as softmax(z / 1.25)",
            smoothing.smoothed_target(label, tempered, alpha),
            "label",
        ),
    ]
    title = f"A handwritten {target} and its label under three losses"
    side = 8 * CELL
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{title}" font-family="sans-serif" font-size="13">',
        STYLE,
        f'<rect class="paper" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>',
        f'<rect class="paper" x="20" y="{TOP}" width="{side}" height="{side}"/>',
    ]
    for index, ink in enumerate(image.tolist()):
        x, y = 20 + CELL * (index % 8), TOP + CELL * (index // 8)
        parts.append(
            f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="#222" '
            f'fill-opacity="{ink:.2f}"/>'
        )
    caption = f"image with label {target}"
    parts.append(f'<text class="soft" x="20" y="{TOP + side + 18}">{caption}</text>')
    for k in range(10):
        weight = "true" if k == target else "soft"
        parts.append(
            f'<text class="{weight}" x="{LEFT + BAR * k + BAR // 2}" y="{TOP + 4 * ROW - 8}" '
            f'text-anchor="middle">{k}</text>'
        )
    for row, (name, note, values, kind) in enumerate(rows):
        parts += bars(row, name, note, values, kind, target)
    return "\n".join([*parts, "</svg>\n"])


def main(arguments: list[str]) -> None:
    x, y = (values[:1200] for values in read_digits())
    chosen = int(arguments[0]) if arguments else IMAGE
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(draw(x[chosen], int(y[chosen]), predict(x, y)[chosen]), encoding="utf-8")
    print(f"wrote {OUT}")


if __name__ == "__main__":
    main(sys.argv[1:])
