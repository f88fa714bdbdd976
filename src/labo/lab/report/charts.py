"""Charts as SVG: lines, bars and pairs of dots.

Colours are CSS variables (``palette``), so a chart follows the theme of the page. A mark has the
class of its method (``m0``, ...), which sets ``--c``. Every chart has a title and a description for
screen readers. One unit is one CSS pixel on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from . import palette

WIDTH = 360
_HEIGHT = 240
_TOP, _BOTTOM, _LEFT, _RIGHT = 44, 42, 46, 14
_CHARACTER = 7.4  # the width of a character of a label, in a wide font
_LABEL_HEIGHT = 14
_ROW_HEIGHT = 24
_MOST_POINTS = 240
_LEGEND_HEIGHT = 30

Point = tuple[float, float]


@dataclass(frozen=True)
class Chart:
    """A drawn chart.

    Attributes:
        name: the ids in it begin with it; unique on a page.
        title: what is shown.
        description: what one sees, for screen readers.
        height: in units; all charts are ``WIDTH`` wide.
        body: SVG elements.
    """

    name: str
    title: str
    description: str
    height: float
    body: str

    @property
    def svg(self) -> str:
        """An ``<svg>`` element that fills the width of its container."""
        return self._element("")

    def at(self, x: float) -> str:
        """An ``<svg>`` element of fixed size at a position within another one."""
        return self._element(f'x="{x:g}" width="{WIDTH}" height="{self.height:g}" ')

    def _element(self, attributes: str) -> str:
        return (
            f'<svg {attributes}viewBox="0 0 {WIDTH} {self.height:g}" role="img" '
            f'aria-labelledby="{self.name}-title {self.name}-desc">'
            f'<title id="{self.name}-title">{escape(self.title)}</title>'
            f'<desc id="{self.name}-desc">{escape(self.description)}</desc>'
            f"{_text(0, 14, self.title, 'heading')}{self.body}</svg>"
        )


def sheet(panels: Sequence[Chart], legend: Sequence[tuple[str, str]] = ()) -> str:
    """Charts side by side as an SVG file, in the light colours.

    Args:
        panels: at least one.
        legend: (class, name) of every method that is drawn.
    """
    style = palette.variables(palette.LIGHT)
    style += (Path(__file__).parent / "charts.css").read_text(encoding="utf-8")
    width = WIDTH * len(panels)
    height = max(panel.height for panel in panels) + (_LEGEND_HEIGHT if legend else 0)
    parts = [panel.at(WIDTH * index) for index, panel in enumerate(panels)]
    parts += [
        _text(20 + 120 * index, height - 8, name, f"end {colour}")
        for index, (colour, name) in enumerate(legend)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" '
        f'width="{width}" height="{height:g}" font-family="sans-serif">'
        f"<style>{escape(style, quote=False)}</style>{''.join(parts)}</svg>\n"
    )


@dataclass(frozen=True)
class Line:
    """A line through points.

    Attributes:
        points: at least one, in the order of x.
        colour: the class of its method.
        label: at the end of the line; empty if another line of the same method has it.
        dashed: a dashed line, with rings as marks.
        marks: the area of the mark at each point, 0 to 1; the line between them is faint. If empty,
            only the last point has a mark.
        filled: the area below the line is shaded, and no point has a mark.
    """

    points: Sequence[Point]
    colour: str
    label: str = ""
    dashed: bool = False
    marks: Sequence[float] = ()
    filled: bool = False


@dataclass(frozen=True)
class Axis:
    """An axis: its label with the unit, and its ends if they do not depend on the points.

    ``names`` has positions and names for an axis of categories.
    """

    label: str
    low: float | None = None
    high: float | None = None
    names: Sequence[tuple[float, str]] = ()

    def ends(self, values: Iterable[float], pad: float) -> Point:
        """The range of the axis: that of the values, wider by the share ``pad`` at free ends."""
        values = list(values)
        low = min(values) if self.low is None else self.low
        high = max(values) if self.high is None else self.high
        room = (high - low) * pad or abs(low) * 0.05 or 0.5
        if self.low is None and (pad or low >= high):
            low -= room
        if self.high is None and (pad or low >= high):
            high += room
        return low, high


@dataclass(frozen=True)
class ChartRow:
    """A row of a bar chart (one value) or of a dot chart (two values)."""

    label: str
    values: Sequence[float]
    colour: str
    strong: bool = False


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between two ends of an axis.

    Example:
        >>> ticks(0.0, 1.0)
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
        >>> ticks(12, 105)
        [20, 40, 60, 80, 100]
    """
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * unit for unit in (1, 2, 5, 10) if power * unit >= rough * 0.999)
    digits = -math.floor(math.log10(step)) if step < 1 else None
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, digits) for i in range(first, last + 1)]


def line_chart(
    name: str,
    title: str,
    description: str,
    x: Axis,
    y: Axis,
    lines: Sequence[Line],
    *,
    diagonal: bool = False,
    level: float | None = None,
) -> Chart:
    """Lines over a grid, with labels at their ends.

    Args:
        name: see :class:`Chart`.
        title: see :class:`Chart`.
        description: see :class:`Chart`.
        x: horizontal axis.
        y: vertical axis.
        lines: at least one.
        diagonal: draw x = y.
        level: draw this value of y.
    """
    lines = [replace(line, points=_thinned(line.points)) for line in lines]
    x_low, x_high = x.ends((p[0] for line in lines for p in line.points), 0.08 if x.names else 0)
    heights = [p[1] for line in lines for p in line.points]
    y_low, y_high = y.ends(heights if level is None else [*heights, level], 0.06)
    longest = max(len(line.label) for line in lines)
    right = WIDTH - _RIGHT - (longest * _CHARACTER + 4 if longest else 0)
    floor = _HEIGHT - _BOTTOM

    def position(point: Point) -> Point:
        across, up = (point[0] - x_low) / (x_high - x_low), (point[1] - y_low) / (y_high - y_low)
        return _LEFT + across * (right - _LEFT), floor - up * (floor - _TOP)

    parts = []
    for value in ticks(y_low, y_high):
        _, at = position((x_low, value))
        parts.append(_rule("grid", (_LEFT, at), (right, at)))
        parts.append(_text(_LEFT - 7, at + 4, _number(value), "tick", "end"))
    for value, text in x.names or [(v, _number(v)) for v in ticks(x_low, x_high, 4)]:
        parts.append(_text(position((value, y_low))[0], floor + 16, text, "tick", "middle"))
    parts.append(_rule("axis", (_LEFT, floor), (right, floor)))
    parts.append(_text((_LEFT + right) / 2, _HEIGHT - 7, x.label, "label", "middle"))
    parts.append(_text(0, 32, y.label, "label"))
    if diagonal:
        parts.append(_rule("guide", position((x_low, x_low)), position((x_high, x_high))))
    if level is not None:
        parts.append(_rule("guide", position((x_low, level)), position((x_high, level))))
    ends = []
    for line in lines:
        positions = [position(point) for point in line.points]
        parts.append(_drawn(line, positions, floor))
        if line.label:
            ends.append((positions[-1][1], line.label, line.colour))
    for at, label, colour in _spread(ends, _TOP, floor):
        parts.append(_text(right + 9, at + 4, label, f"end {colour}"))
    return Chart(name, title, description, _HEIGHT, "".join(parts))


def bar_chart(name: str, title: str, description: str, rows: Sequence[ChartRow]) -> Chart:
    """Bars from 0 to 1 with their numbers, to three decimals."""
    left, parts = _named(rows)
    for row, at in zip(rows, _heights(rows), strict=True):
        width = row.values[0] * (WIDTH - 44 - left)
        parts.append(
            f'<rect class="bar {row.colour}" x="{left:.1f}" y="{at - 7}" width="{width:.1f}" '
            'height="14"/>'
        )
        shown = "value strong" if row.strong else "value"
        parts.append(_text(left + width + 6, at + 4, f"{row.values[0]:.3f}", shown))
    parts.append(_rule("axis", (left, _TOP - 12), (left, _end(rows))))
    return Chart(name, title, description, _end(rows) + 4, "".join(parts))


def dot_chart(name: str, title: str, description: str, x: str, rows: Sequence[ChartRow]) -> Chart:
    """A ring and a dot per row on a scale from 0 to 1, with their numbers."""
    left, parts = _named(rows)
    left, right, floor = left + 8, WIDTH - 34.0, _end(rows)
    for value in ticks(0, 1):
        at = left + value * (right - left)
        parts.append(_rule("grid", (at, _TOP - 12), (at, floor)))
        parts.append(_text(at, floor + 16, _number(value), "tick", "middle"))
    parts.append(_text((left + right) / 2, floor + 34, x, "label", "middle"))
    for row, at in zip(rows, _heights(rows), strict=True):
        ring, full = (left + value * (right - left) for value in row.values)
        parts.append(
            f'<line class="span {row.colour}" x1="{ring:.1f}" y1="{at}" x2="{full:.1f}" y2="{at}"/>'
            f'<circle class="ring {row.colour}" cx="{ring:.1f}" cy="{at}" r="4.5"/>'
            f'<circle class="dot {row.colour}" cx="{full:.1f}" cy="{at}" r="4.5"/>'
        )
        outward = 9 if ring > full else -9
        for mark, value, offset in zip((ring, full), row.values, (outward, -outward), strict=True):
            anchor = "start" if offset > 0 else "end"
            parts.append(_text(mark + offset, at + 4, f"{value:.2f}", "value", anchor))
    return Chart(name, title, description, floor + 42, "".join(parts))


# ------------------------------------------------------------------ parts


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    anchored = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"{anchored}>{escape(text)}</text>'


def _rule(kind: str, start: Point, end: Point) -> str:
    return (
        f'<line class="{kind}" x1="{start[0]:.1f}" y1="{start[1]:.1f}" '
        f'x2="{end[0]:.1f}" y2="{end[1]:.1f}"/>'
    )


def _drawn(line: Line, positions: Sequence[Point], floor: float) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in positions)
    kind = f"line dashed {line.colour}" if line.dashed else f"line {line.colour}"
    kind += " faint" if line.marks else ""
    drawn = f'<polyline class="{kind}" points="{path}"/>'
    if line.filled:
        area = f"{positions[0][0]:.1f},{floor} {path} {positions[-1][0]:.1f},{floor}"
        return f'<polygon class="area {line.colour}" points="{area}"/>{drawn}'
    mark = f"ring {line.colour}" if line.dashed else f"dot {line.colour}"
    radii = [1.6 + 6 * math.sqrt(area) for area in line.marks]
    for (x, y), radius in zip(positions if radii else positions[-1:], radii or [2.5], strict=True):
        drawn += f'<circle class="{mark}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"/>'
    return drawn


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    """At most ``_MOST_POINTS`` points: means of neighbours."""
    size = -(-len(points) // _MOST_POINTS)
    if size == 1:
        return points
    chunks = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in c) / len(c), sum(y for _, y in c) / len(c)) for c in chunks]


def _spread(
    ends: Sequence[tuple[float, str, str]], top: float, floor: float
) -> list[tuple[float, str, str]]:
    """Labels moved apart so that none covers another."""
    placed: list[tuple[float, str, str]] = []
    at = top - _LABEL_HEIGHT
    for wanted, label, colour in sorted(ends):
        at = max(wanted, at + _LABEL_HEIGHT)
        placed.append((at, label, colour))
    limit = floor + _LABEL_HEIGHT
    for i in reversed(range(len(placed))):
        limit = min(placed[i][0], limit - _LABEL_HEIGHT)
        placed[i] = limit, *placed[i][1:]
    return placed


def _named(rows: Sequence[ChartRow]) -> tuple[float, list[str]]:
    """The x position of the rows, to the right of their labels; and the labels."""
    left = max(len(row.label) for row in rows) * _CHARACTER + 8
    parts = [
        _text(left - 8, at + 4, row.label, "name strong" if row.strong else "name", "end")
        for row, at in zip(rows, _heights(rows), strict=True)
    ]
    return left, parts


def _heights(rows: Sequence[ChartRow]) -> list[int]:
    return [_TOP + _ROW_HEIGHT * i for i in range(len(rows))]


def _end(rows: Sequence[ChartRow]) -> int:
    return _TOP + _ROW_HEIGHT * (len(rows) - 1) + 12


def _number(value: float) -> str:
    if abs(value) >= 10_000 and value == round(value):
        return f"{value:,.0f}".replace(",", "\u202f")  # a narrow space between thousands
    return f"{value:g}".replace("-", "\u2212")
