"""Charts as SVG: lines, bars, dots on a scale.

Colours are CSS variables (``palette``), so a chart follows the theme of the page. The marks of a
method are in a ``g`` element with the classes of its style and its label as ``data-series``. Every
chart has a title and a description for screen readers. One unit is one CSS pixel on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from statistics import quantiles

from . import palette
from .palette import MARKERS, Style

WIDTH = 360
_HEIGHT = 240
_TOP, _BOTTOM, _LEFT, _RIGHT = 44, 42, 46, 14
_CHARACTER = 7.4  # the width of a character of a label, in a wide font
_LABEL_HEIGHT = 14
_ROW_HEIGHT = 24
_MOST_POINTS = 240
_LEGEND_HEIGHT = 30
_GAP, _MARGIN = 28, 10  # between the charts of a file, and at its sides
_SAMPLE = (28, 12)  # width and height of a piece of line in a legend
_MARKS = 5  # on a line with many points
_FEW_POINTS = 20  # a chart whose lines have fewer is never cut

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

    def at(self, x: float, y: float = 0) -> str:
        """An ``<svg>`` element of fixed size at a position within another one."""
        return self._element(f'x="{x:g}" y="{y:g}" width="{WIDTH}" height="{self.height:g}" ')

    def _element(self, attributes: str) -> str:
        return (
            f'<svg {attributes}viewBox="0 0 {WIDTH} {self.height:g}" role="img" '
            f'aria-labelledby="{self.name}-title {self.name}-desc">'
            f'<title id="{self.name}-title">{escape(self.title)}</title>'
            f'<desc id="{self.name}-desc">{escape(self.description)}</desc>'
            f"{_text(0, 14, self.title, 'heading')}{self.body}</svg>"
        )


def sheet(
    panels: Sequence[Chart],
    legend: Sequence[tuple[Style, str]] = (),
    *,
    columns: int | None = None,
) -> str:
    """Charts side by side as an SVG file, in the light colours.

    Args:
        panels: at least one.
        legend: style and name of every method that is drawn.
        columns: charts in a row; by default all are in one.
    """
    style = palette.variables(palette.LIGHT)
    style += (Path(__file__).parent / "charts.css").read_text(encoding="utf-8")
    columns = min(columns or len(panels), len(panels))
    width = WIDTH * columns + _GAP * (columns - 1) + 2 * _MARGIN
    drawn, height = [], 0.0
    for start in range(0, len(panels), columns):
        row = panels[start : start + columns]
        top = height + _GAP if start else 0.0
        drawn += [panel.at(_MARGIN + (WIDTH + _GAP) * i, top) for i, panel in enumerate(row)]
        height = top + max(panel.height for panel in row)
    across, bottom = float(_MARGIN), height + _LEGEND_HEIGHT
    for shown, label in legend:
        length = _SAMPLE[0] + 6 + len(label) * _CHARACTER
        if across > _MARGIN and across + length > width - _MARGIN:
            across, bottom = float(_MARGIN), bottom + _LEGEND_HEIGHT
        drawn.append(f'<g transform="translate({across:.1f} {bottom - 18:g})">{_sample(shown)}</g>')
        drawn.append(_text(across + _SAMPLE[0] + 6, bottom - 8, label, f"end {shown.colour}"))
        across += length + 20
    height = bottom if legend else height
    # The page may be dark.
    parts = [f'<rect width="{width}" height="{height:g}" fill="var(--page)"/>', *drawn]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" '
        f'width="{width}" height="{height:g}" font-family="sans-serif">'
        f"<style>{escape(style, quote=False)}</style>{''.join(parts)}</svg>\n"
    )


def swatch(style: Style) -> str:
    """A piece of line with the marker of a method, for tables and legends."""
    width, height = _SAMPLE
    return (
        f'<svg class="swatch" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'aria-hidden="true">{_sample(style)}</svg>'
    )


def _sample(style: Style) -> str:
    width, height = _SAMPLE
    line = f'<polyline class="line" points="0,{height / 2:g} {width},{height / 2:g}"/>'
    return f'<g class="{style.classes}">{line}{_marker(style, width / 2, height / 2, 4)}</g>'


@dataclass(frozen=True)
class Line:
    """A line through points.

    Attributes:
        points: at least one, in the order of x.
        style: of its method.
        series: the label of its method. Pointing at one mark brings forward all marks of a series.
        label: at the end of the line; empty for none.
        after: whether it is a second line of the same method: dashed, with rings as marks.
        marks: the area of the mark at each point, 0 to 1. If empty, a few points have a mark.
        band: (low, high) at each point, shaded; empty for none.
        filled: the area below the line is shaded, and no point has a mark.
    """

    points: Sequence[Point]
    style: Style
    series: str
    label: str = ""
    after: bool = False
    marks: Sequence[float] = ()
    band: Sequence[Point] = ()
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
    """A row of a bar chart or of a dot chart.

    Attributes:
        label: at the left.
        value: where the mark is.
        style: of its method.
        text: at the right: the number as it is shown.
        ring: where a second mark is, if there is one.
        dots: small marks, one per seed.
        interval: the ends of a horizontal line.
        strong: whether label and text are bold.
    """

    label: str
    value: float
    style: Style
    text: str
    ring: float | None = None
    dots: Sequence[float] = ()
    interval: Point | None = None
    strong: bool = False


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between two ends of an axis: about ``most``, and at least two.

    Example:
        >>> ticks(0.0, 1.0)
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
        >>> ticks(12, 105)
        [20, 40, 60, 80, 100]
        >>> ticks(-3.4, 3.4, most=2)
        [-2, 0, 2]
    """
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    found: list[float] = []
    for unit in (10, 5, 2, 1, 0.5, 0.2):
        step = power * unit
        if len(found) < 2 or step >= rough * 0.999:
            digits = -math.floor(math.log10(step)) if step < 1 else None
            first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
            found = [round(i * step, digits) for i in range(first, last + 1)]
    return found


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
    settled: bool = False,
    starts: Sequence[tuple[float, str]] = (),
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
        settled: cut off the beginning of a line, up to a fifth of the width, where it is outside of
            the range of the rest; not if the lines have few points.
        starts: values of x with a vertical line, and what begins there.
    """
    lines = [_thinned(line) for line in lines]
    if settled:
        lines = _settled(lines)
    x_low, x_high = x.ends((p[0] for line in lines for p in line.points), 0.08 if x.names else 0)
    heights = [p[1] for line in lines for p in line.points]
    heights += [end for line in lines for ends in line.band for end in ends]
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
    for value, text in starts:
        if x_low <= value <= x_high:
            at, _ = position((value, y_low))
            leftwards = at > (_LEFT + right) / 2  # the text is on the side with more room
            parts.append(_rule("guide", (at, _TOP - 4), (at, floor)))
            side = "end" if leftwards else "start"
            parts.append(_text(at + (-4 if leftwards else 4), _TOP + 4, text, "tick", side))
    ends = []
    for line in lines:
        positions = [position(point) for point in line.points]
        band = [
            (position((at, low)), position((at, high)))
            for (at, _), (low, high) in zip(line.points, line.band or line.points, strict=True)
        ]
        parts.append(_drawn(line, positions, band if line.band else [], floor))
        if line.label:
            ends.append((positions[-1][1], line))
    for at, line in _spread(ends, _TOP, floor):
        label = _text(right + 9, at + 4, line.label, "end")
        parts.append(_series(line.series, line.style, label))
    return Chart(name, title, description, _HEIGHT, "".join(parts))


def bar_chart(name: str, title: str, description: str, rows: Sequence[ChartRow]) -> Chart:
    """Bars from 0 to 1 with their numbers."""
    left, parts = _named(rows)
    for row, at in zip(rows, _heights(rows), strict=True):
        width = row.value * (WIDTH - 44 - left)
        parts.append(
            f'<rect class="bar {row.style.colour}" x="{left:.1f}" y="{at - 7}" '
            f'width="{width:.1f}" height="14"/>'
        )
        shown = "value strong" if row.strong else "value"
        parts.append(_text(left + width + 6, at + 4, row.text, shown))
    parts.append(_rule("axis", (left, _TOP - 12), (left, _end(rows))))
    return Chart(name, title, description, _end(rows) + 4, "".join(parts))


def dot_chart(
    name: str,
    title: str,
    description: str,
    x: Axis,
    rows: Sequence[ChartRow],
    *,
    level: float | None = None,
) -> Chart:
    """Marks on a horizontal scale, one row per method. An arrow is a row far outside of the scale.

    Args:
        name: see :class:`Chart`.
        title: see :class:`Chart`.
        description: see :class:`Chart`.
        x: the scale.
        rows: at least one.
        level: draw this value of x.
    """
    left, parts = _named(rows)
    longest = max(len(row.text) for row in rows)
    left, right, floor = left + 4, WIDTH - 10 - longest * 7.0, _end(rows)
    near = _without_outliers(rows)
    values = [row.value for row in near] + [end for row in near for end in row.interval or ()]
    values += [dot for row in near for dot in row.dots]
    values += [row.ring for row in near if row.ring is not None]
    low, high = x.ends(values if level is None else [*values, level], 0.05)

    def place(value: float) -> float:
        return left + (min(max(value, low), high) - low) / (high - low) * (right - left)

    for value in ticks(low, high, 3):
        parts.append(_rule("grid", (place(value), _TOP - 12), (place(value), floor)))
        parts.append(_text(place(value), floor + 16, _number(value), "tick", "middle"))
    if level is not None:
        parts.append(_rule("guide", (place(level), _TOP - 12), (place(level), floor)))
    parts.append(_text((left + right) / 2, floor + 34, x.label, "label", "middle"))
    for row, at in zip(rows, _heights(rows), strict=True):
        marks = ""
        shown = "value strong" if row.strong else "value"
        if row not in near:
            side = -1 if row.value < low else 1
            end, back = place(row.value), 7 * side
            arrow = f"{end + back:.1f},{at} {end:.1f},{at - 5} {end:.1f},{at + 5}"
            marks = f'<polygon class="dot far" points="{arrow}"/>'
            marks += _text(WIDTH, at + 4, row.text, shown, "end")
            parts.append(_series(row.label, row.style, marks))
            continue
        if row.ring is not None:
            marks += _rule("span", (place(row.ring), at), (place(row.value), at))
            marks += _marker(row.style, place(row.ring), at, 4.5, "ring")
        if row.interval is not None:
            marks += _rule("span", (place(row.interval[0]), at), (place(row.interval[1]), at))
        marks += "".join(
            f'<circle class="seed" cx="{place(dot):.1f}" cy="{at}" r="2.6"/>' for dot in row.dots
        )
        marks += _marker(row.style, place(row.value), at, 5)
        marks += _text(WIDTH, at + 4, row.text, shown, "end")
        parts.append(_series(row.label, row.style, marks))
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


def _series(label: str, style: Style, marks: str) -> str:
    return f'<g class="{style.classes}" data-series="{escape(label)}">{marks}</g>'


def _drawn(
    line: Line, positions: Sequence[Point], band: Sequence[tuple[Point, Point]], floor: float
) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in positions)
    drawn = ""
    if line.filled:
        area = f"{positions[0][0]:.1f},{floor} {path} {positions[-1][0]:.1f},{floor}"
        drawn += f'<polygon class="area" points="{area}"/>'
    if len(band) == 1:
        drawn += _rule("whisker", *band[0])
    elif band:
        edge = [low for low, _ in band] + [high for _, high in reversed(band)]
        around = " ".join(f"{x:.1f},{y:.1f}" for x, y in edge)
        drawn += f'<polygon class="band" points="{around}"/>'
    kind = "line after" if line.after else "line"
    if len(positions) > 1:
        drawn += f'<polyline class="{kind}{" faint" if line.marks else ""}" points="{path}"/>'
    mark = "ring" if line.after else "dot"
    if line.marks:
        for (x, y), share in zip(positions, line.marks, strict=True):
            drawn += _marker(line.style, x, y, 1.8 + 6 * math.sqrt(share), mark)
    elif not line.filled:
        for index in _marked(len(positions), line.style.marker):
            drawn += _marker(line.style, *positions[index], 3.4, mark)
    return _series(line.series, line.style, drawn)


def _marked(count: int, which: int) -> list[int]:
    """The points of a line that have a marker; of each style other ones, and always the last.

    Example:
        >>> _marked(3, 0), _marked(100, 0), _marked(100, 1)
        ([0, 1, 2], [0, 20, 40, 60, 80, 99], [1, 21, 41, 61, 81, 99])
    """
    if count <= _MARKS:
        return list(range(count))
    step = count / _MARKS
    first = which / len(MARKERS) * step
    return [*(int(first + i * step) for i in range(_MARKS)), count - 1]


def _marker(style: Style, x: float, y: float, r: float, kind: str = "dot") -> str:
    """A marker of about the area of a circle of radius r: ``dot`` is filled, ``ring`` is hollow."""
    name = MARKERS[style.marker]
    if name == "circle":
        return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{r:.1f}"/>'
    corners = " ".join(f"{x + r * dx:.1f},{y + r * dy:.1f}" for dx, dy in _SHAPES[name])
    return f'<polygon class="{kind}" points="{corners}"/>'


def _regular(corners: int, size: float, start: float = -90.0, inner: float = 1.0) -> list[Point]:
    """The corners of a regular polygon; of a star if every other one has the radius ``inner``."""
    angles = [math.radians(start + 360 * i / corners) for i in range(corners)]
    radii = [size * (inner if i % 2 else 1) for i in range(corners)]
    return [
        (r * math.cos(angle), r * math.sin(angle)) for r, angle in zip(radii, angles, strict=True)
    ]


_PLUS = [
    (-0.42, -1.2), (0.42, -1.2), (0.42, -0.42), (1.2, -0.42), (1.2, 0.42), (0.42, 0.42),
    (0.42, 1.2), (-0.42, 1.2), (-0.42, 0.42), (-1.2, 0.42), (-1.2, -0.42), (-0.42, -0.42),
]  # fmt: skip
_TURN = math.sqrt(0.5)

# The corners of each marker around (0, 0).
_SHAPES: dict[str, list[Point]] = {
    "square": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
    "triangle": _regular(3, 1.35),
    "diamond": _regular(4, 1.3),
    "down": _regular(3, 1.35, 90),
    "hourglass": [(-1, -1.15), (1, -1.15), (-1, 1.15), (1, 1.15)],
    "pill": [(-1.35, -0.45), (1.35, -0.45), (1.35, 0.45), (-1.35, 0.45)],
    "cross": [((x - y) * _TURN, (x + y) * _TURN) for x, y in _PLUS],
    "plus": _PLUS,
    "bar": [(-0.45, -1.35), (0.45, -1.35), (0.45, 1.35), (-0.45, 1.35)],
    "star": _regular(10, 1.45, inner=0.45),
    "hexagon": _regular(6, 1.1, 0),
}


def _thinned(line: Line) -> Line:
    """The line with at most ``_MOST_POINTS`` points: means of neighbours."""
    size = -(-len(line.points) // _MOST_POINTS)
    if size == 1:
        return line

    def thinned(points: Sequence[Point]) -> list[Point]:
        chunks = [points[i : i + size] for i in range(0, len(points), size)]
        return [(sum(x for x, _ in c) / len(c), sum(y for _, y in c) / len(c)) for c in chunks]

    return replace(line, points=thinned(line.points), band=thinned(line.band))


def _settled(lines: Sequence[Line]) -> list[Line]:
    """The lines without what is before the last point that is early and outside of the range."""
    if max(len(line.points) for line in lines) < _FEW_POINTS:
        return list(lines)
    xs = [x for line in lines for x, _ in line.points]
    start = min(xs) + (max(xs) - min(xs)) / 5
    late = [y for line in lines for x, y in line.points if x >= start]
    low, high = min(late), max(late)
    slack = (high - low) / 4
    found = []
    for line in lines:
        far = [
            i
            for i, (x, y) in enumerate(line.points)
            if x < start and not low - slack <= y <= high + slack
        ]
        first = far[-1] + 1 if far else 0
        found.append(replace(line, points=line.points[first:], band=line.band[first:]))
    return [line for line in found if line.points]


def _spread(
    ends: Sequence[tuple[float, Line]], top: float, floor: float
) -> list[tuple[float, Line]]:
    """Labels moved apart so that none covers another."""
    placed: list[tuple[float, Line]] = []
    at = top - _LABEL_HEIGHT
    for wanted, line in sorted(ends, key=lambda end: (end[0], end[1].label)):
        at = max(wanted, at + _LABEL_HEIGHT)
        placed.append((at, line))
    limit = floor + _LABEL_HEIGHT
    for i in reversed(range(len(placed))):
        limit = min(placed[i][0], limit - _LABEL_HEIGHT)
        placed[i] = limit, placed[i][1]
    return placed


def _without_outliers(rows: Sequence[ChartRow]) -> list[ChartRow]:
    """The rows whose value is not far away from those of most others.

    Far is more than six times the distance between the quartiles outside of them. With fewer than
    five rows nothing is far.
    """
    if len(rows) < 5:
        return list(rows)
    first, _, third = quantiles([row.value for row in rows], n=4)
    far = 6 * (third - first)
    return [row for row in rows if first - far <= row.value <= third + far]


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
