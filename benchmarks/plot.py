"""A small line chart as SVG, for light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 360, 64, 200, 40, 48


def line_chart(
    title: str, x_label: str, y_label: str, lines: Mapping[str, Sequence[tuple[float, float]]]
) -> str:
    """A chart with two logarithmic axes; ``lines`` maps a name to its points."""
    points = [point for line in lines.values() for point in line]
    x_low, x_high = (pick(math.log10(x) for x, _ in points) for pick in (min, max))
    y_low, y_high = (pick(math.log10(y) for _, y in points) for pick in (min, max))
    y_low, y_high = math.floor(y_low), math.ceil(y_high)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - x_low) / ((x_high - x_low) or 1)
        up = (math.log10(y) - y_low) / ((y_high - y_low) or 1)
        inner = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        return _LEFT + across * inner[0], _HEIGHT - _BOTTOM - up * inner[1]

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(title)}" font-family="sans-serif" font-size="12">',
        "<style>text{fill:#222}.grid{stroke:#ccc}@media (prefers-color-scheme:dark)"
        "{text{fill:#ddd}.grid{stroke:#444}}</style>",
        f'<text x="{_LEFT}" y="20" font-size="15">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="{_HEIGHT - 8}">{escape(x_label)}</text>',
        f'<text x="8" y="{_TOP - 14}">{escape(y_label)}</text>',
    ]
    some_x = 10**x_low
    for power in range(y_low, y_high + 1):
        x, y = place(some_x, 10.0**power)
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>'
        )
    for x_value in sorted({x for x, _ in points}):
        x, y = place(x_value, 10.0**y_low)
        parts.append(f'<text x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{x_value:g}</text>')
    for i, (name, line) in enumerate(lines.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        places = [place(*point) for point in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        key = _TOP + 18 * i
        parts.append(
            f'<rect x="{_WIDTH - _RIGHT + 16}" y="{key}" width="10" height="10" fill="{colour}"/>'
            f'<text x="{_WIDTH - _RIGHT + 32}" y="{key + 10}">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])
