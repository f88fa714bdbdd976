"""Charts, drawn by matplotlib: lines, bars, dots on a scale.

A chart knows its data and how to draw them. :func:`sheet` draws charts side by side, as a figure
for a file. :attr:`Chart.svg` is one chart for a page: its colours are CSS variables (``palette``),
so it follows the theme, and the marks of a method have its label as ``data-series``. One unit is
one CSS pixel on a phone.
"""

from __future__ import annotations

import csv
import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from html import escape
from pathlib import Path
from statistics import quantiles
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from matplotlib.lines import Line2D
from matplotlib.markers import MarkerStyle
from matplotlib.patches import PathPatch
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Affine2D

from .palette import COLOURS, DASHES, MARKERS, Style, light

WIDTH = 360
_HEIGHT = 240
_TOP, _BOTTOM, _LEFT, _RIGHT = 44, 42, 46, 14
_CHARACTER = 7.4  # the width of a character of a label, in a wide font
_LABEL_HEIGHT, _LONGEST_TITLE = 14, 44  # in units, and in characters
_ROW_HEIGHT, _LONGEST_ROW = 24, 24  # in units, and in characters of its label
_LEGEND_HEIGHT = 22
_GAP, _MARGIN = 28, 10  # between the charts of a file, and at its sides
_SAMPLE = (28, 12)  # width and height of a piece of line in a table
_MARKS = 5  # on a line with many points
_FEW_POINTS = 20  # a chart whose lines have fewer is never cut

_STYLE = Path(__file__).parent / "charts.mplstyle"

Point = tuple[float, float]
Datum = dict[str, Any]


class Panel:
    """A place on a drawing, in units from its upper left corner."""

    def __init__(self, drawing: Drawing, left: float, top: float) -> None:
        self.drawing, self.left, self.top = drawing, left, top
        self.width, self.height = (72 * inches for inches in drawing.get_size_inches())

    def axes(self, left: float, top: float, right: float, bottom: float) -> Axes:
        """Axes whose frame has these sides."""
        size = (right - left) / self.width, (bottom - top) / self.height
        return self.drawing.add_axes((*self._share(left, bottom), *size))

    def text(self, x: float, y: float, text: str, **options: Any) -> None:
        """Text that begins at a point."""
        self.drawing.text(*self._share(x, y), text, **options)

    def _share(self, x: float, y: float) -> Point:
        return (self.left + x) / self.width, 1 - (self.top + y) / self.height


@dataclass(frozen=True)
class Chart:
    """A chart."""

    name: str  # the ids in it begin with it; unique on a page
    title: str  # what is shown
    description: str  # what one sees, for screen readers
    height: float  # in units; all charts are ``WIDTH`` wide
    draw: Callable[[Panel], None]
    data: Sequence[Datum]  # what is drawn, a row per mark
    cut: bool = False  # whether a row is far outside of the scale

    @property
    def svg(self) -> str:
        """An ``<svg>`` element that fills the width of its container."""
        with matplotlib.rc_context(fname=_STYLE):
            drawing = Drawing(figsize=(WIDTH / 72, self.height / 72))
            self.draw_at(drawing, 0, 0)
            body = _for_page(drawing, self.name)
        return (
            f'<svg viewBox="0 0 {WIDTH} {self.height:g}" role="img" '
            f'aria-labelledby="{self.name}-title {self.name}-desc">'
            f'<title id="{self.name}-title">{escape(self.title)}</title>'
            f'<desc id="{self.name}-desc">{escape(self.description)}</desc>{body}</svg>'
        )

    def draw_at(self, drawing: Drawing, left: float, top: float) -> None:
        """Draw it with its title somewhere on a drawing."""
        panel = Panel(drawing, left, top)
        size = 13.5 / max(1, len(self.title) / _LONGEST_TITLE)
        panel.text(0, 14, self.title, size=size, weight="bold")
        self.draw(panel)


# ------------------------------------------------------------------ files


def sheet(
    panels: Sequence[Chart],
    legend: Sequence[tuple[Style, str]] = (),
    *,
    columns: int | None = None,
) -> dict[str, bytes]:
    """Charts side by side, in the light colours: suffix -> content of an SVG, a PDF and a CSV file.

    ``legend`` has style and name of every method that is drawn. By default all charts are in one
    row. Equal charts have equal files.
    """
    columns = min(columns or len(panels), len(panels))
    rows = [panels[start : start + columns] for start in range(0, len(panels), columns)]
    heights = [max(panel.height for panel in row) for row in rows]
    width = WIDTH * columns + _GAP * (columns - 1) + 2 * _MARGIN
    longest = max((len(label) for _, label in legend), default=0)
    across = max(1, math.floor(width / (longest * _CHARACTER + 50)))
    below = _LEGEND_HEIGHT * math.ceil(len(legend) / across)
    height = sum(heights) + _GAP * (len(rows) - 1) + below + 2 * _MARGIN
    with matplotlib.rc_context(fname=_STYLE):
        drawing = Drawing(figsize=(width / 72, height / 72))
        top = float(_MARGIN)
        for row, tallest in zip(rows, heights, strict=True):
            for i, panel in enumerate(row):
                panel.draw_at(drawing, _MARGIN + (WIDTH + _GAP) * i, top)
            top += tallest + _GAP
        if legend:
            lines = [Line2D([], [], **_look(style)) for style, _ in legend]
            names = [label for _, label in legend]
            drawing.legend(lines, names, loc="lower left", ncols=across)
        files = {
            ".svg": _saved(drawing, "svg", "labo", {"Date": None}),
            ".pdf": _saved(drawing, "pdf", "labo", {"CreationDate": None}),
        }
    return {**files, ".csv": _csv(panels).encode()}


def _saved(drawing: Drawing, kind: str, salt: str, metadata: dict[str, None]) -> bytes:
    """A drawing in a format; ``salt`` makes the ids in it.

    The font lacks letters of some languages. SVG has them as text; in PDF they are boxes.
    """
    content = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": salt}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        drawing.savefig(content, format=kind, metadata=metadata)
    return content.getvalue()


def _csv(panels: Sequence[Chart]) -> str:
    """The data of charts: a row per mark, with the title of its chart."""
    rows = [{"chart": panel.title, **datum} for panel in panels for datum in panel.data]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


# ------------------------------------------------------------------ the page


@cache
def swatch(style: Style) -> str:
    """A piece of line with the marker of a method, for tables and legends."""
    width, height = _SAMPLE
    marker = MarkerStyle(MARKERS[style.marker])
    place = marker.get_transform() + Affine2D().scale(8).translate(width / 2, height / 2)
    with matplotlib.rc_context(fname=_STYLE):
        drawing = Drawing(figsize=(width / 72, height / 72))
        drawing.add_artist(Line2D([0, 1], [0.5, 0.5], **_look(style) | {"marker": ""}))
        look: dict[str, Any] = {"facecolor": light(style.colour), "edgecolor": light("page")}
        drawing.add_artist(PathPatch(marker.get_path(), **look, linewidth=0.8, transform=place))
        body = _for_page(drawing, "swatch")
    return (
        f'<svg class="swatch" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'aria-hidden="true">{body}</svg>'
    )


def _for_page(drawing: Drawing, name: str) -> str:
    """The elements of a drawing: small, with CSS variables as colours and the font of the page.

    Artists of a method have the gid ``KIND:LABEL``: a CSS class, and its series. ``name`` makes the
    ids of the shapes of markers, which must be unique on the page.
    """
    drawing.patch.set_visible(False)
    svg = _saved(drawing, "svg", name, {"Date": None}).decode()
    body = svg[svg.index("<g ") : svg.rindex("</svg>")]
    body = re.sub(r"<!--.*?-->|<clipPath.*?</clipPath>", "", body, flags=re.DOTALL)
    return re.sub(r"\s*(<[^>]+>)\s*", _tag, body)


_COLOURS = {light(name): f"var(--{name})" for name in COLOURS}
# What is replaced in a tag; a text between tags is the user's.
_REPLACED: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r' clip-path="[^"]*"| transform="rotate\(-0 [^"]*"| font-family: [^;]*;|xlink:', ""),
    (r'^<g id="[^"]*"', "<g"),
    (r"\s+", " "),
    (r"-?\d+\.\d{2,}", lambda number: f"{float(number[0]):.{1 if len(number[0]) > 8 else 2}f}"),
    ("|".join(_COLOURS), lambda colour: _COLOURS[colour[0]]),
)


def _tag(match: re.Match[str]) -> str:
    tag = match[1]
    if series := re.match(r'<g id="(\w+):([^"]*)"', tag):
        return f'<g class="{series[1]}" data-series="{series[2]}">'
    for pattern, text in _REPLACED:
        tag = re.sub(pattern, text, tag)
    return tag


# ------------------------------------------------------------------ lines


@dataclass(frozen=True)
class Line:
    """A line through points."""

    points: Sequence[Point]  # at least one, in the order of x
    style: Style  # of its method
    # the label of its method. Pointing at one mark brings forward all marks of a series.
    series: str
    label: str = ""  # at the end of the line; empty for none
    # whether it is a second line of the same method: dashed, with rings as marks
    after: bool = False
    # the area of the mark at each point, 0 to 1. If empty, a few points have a mark.
    marks: Sequence[float] = ()
    band: Sequence[Point] = ()  # (low, high) at each point, shaded; empty for none
    filled: bool = False  # the area below the line is shaded, and no point has a mark


@dataclass(frozen=True)
class Axis:
    """An axis: its label with the unit, and its ends if they do not depend on the points.

    ``names`` has positions and names for an axis of categories. ``log``: a logarithmic scale.
    """

    label: str
    low: float | None = None
    high: float | None = None
    names: Sequence[tuple[float, str]] = ()
    log: bool = False


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

    ``diagonal`` draws x = y, and ``level`` this value of y. ``settled`` cuts off the beginning of a
    line, up to a fifth of the width, where it is outside of the range of the rest; not if the lines
    have few points. ``starts`` are values of x with a vertical line, and what begins there.
    """
    shown = _settled(lines) if settled else lines
    longest = max(len(line.label) for line in lines)
    right = WIDTH - _RIGHT - (longest * _CHARACTER + 4 if longest else 0)
    floor = _HEIGHT - _BOTTOM

    def draw(panel: Panel) -> None:
        axes = panel.axes(_LEFT, _TOP, right, floor)
        panel.text(0, 30, y.label, color=light("quiet"), size=12)
        axes.set_xlabel(x.label)
        for line in shown:
            _draw_line(axes, line)
        if level is not None:
            axes.axhline(level, **_GUIDE)
        _scale(axes, x, y)
        if diagonal:
            axes.plot(axes.get_xlim(), axes.get_xlim(), **_GUIDE)
        low, high = axes.get_xlim()
        for at, text in starts:
            if low <= at <= high:
                axes.axvline(at, **_GUIDE)
                side = "right" if at > (low + high) / 2 else "left"  # where there is more room
                look: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "ha": side}
                look |= {"textcoords": "offset points", "color": light("quiet")}
                axes.annotate(text, (at, 1), (-4 if side == "right" else 4, 0), **look)
        for at, line in _spread(axes, [line for line in shown if line.label]):
            look = {"color": light(line.style.colour), "gid": f"mark:{line.series}"}
            panel.text(right + 9, at + 4, line.label, **look, weight="bold", size=12)

    data = [
        {"series": line.series, x.label: point[0], y.label: point[1]}
        | ({"low": line.band[i][0], "high": line.band[i][1]} if line.band else {})
        for line in lines
        for i, point in enumerate(line.points)
    ]
    return Chart(name, title, description, _HEIGHT, draw, data)


_GUIDE: dict[str, Any] = {"color": light("quiet"), "linewidth": 1, "linestyle": (0, (2, 3))}


def _scale(axes: Axes, x: Axis, y: Axis) -> None:
    """The ends of the axes, their grid and their ticks."""
    axes.margins(x=0.08 if x.names else 0, y=0.06)
    axes.grid(axis="y")
    if x.log and y.log:
        axes.set(xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
    else:
        axes.xaxis.set_major_locator(_ticks(4))
        axes.yaxis.set_major_locator(_ticks(5))
    if x.names:
        axes.set_xticks([at for at, _ in x.names], [text for _, text in x.names])
    axes.set_xlim(x.low, x.high)
    axes.set_ylim(y.low, y.high)


def _ticks(most: int) -> MaxNLocator:
    return MaxNLocator(most, steps=[1, 2, 2.5, 5, 10])


def _draw_line(axes: Axes, line: Line) -> None:
    colour, page = light(line.style.colour), light("page")
    xs, ys = zip(*line.points, strict=True)
    shade: dict[str, Any] = {"color": colour, "gid": f"band:{line.series}"}
    if line.filled:
        axes.fill_between(xs, ys, **shade, alpha=0.13, linewidth=0)
    if line.band:
        low, high = zip(*line.band, strict=True)
        if len(xs) == 1:
            axes.vlines(xs, low, high, **shade, alpha=0.35, linewidth=1)
        else:
            axes.fill_between(xs, low, high, **shade, alpha=0.13, linewidth=0)
    look = _look(line.style, gid=f"line:{line.series}", clip_on=False)
    step = math.ceil(len(xs) / _MARKS)
    look["markevery"] = (line.style.marker * step // len(MARKERS), step)  # of each style others
    if line.after:
        look["linestyle"] = (0, (5, 4))
    if line.marks:
        sizes = [(2 * (1.8 + 6 * math.sqrt(share))) ** 2 for share in line.marks]
        mark: dict[str, Any] = {"marker": look["marker"], "gid": f"mark:{line.series}"}
        mark |= {"facecolor": page, "edgecolor": colour} if line.after else {"edgecolor": page}
        width = 1.6 if line.after else 0.8
        axes.scatter(xs, ys, sizes, color=colour, **mark, linewidth=width, zorder=2.5)
        look["alpha"] = 0.55
    if line.marks or line.filled:
        look["marker"] = ""
    axes.plot(xs, ys, **look)


def _look(style: Style, **further: Any) -> dict[str, Any]:
    """How matplotlib draws the line and the marker of a method."""
    dash, marker = DASHES[style.dash], MARKERS[style.marker]
    look = {"color": light(style.colour), "linestyle": (0, dash) if dash else "-", **further}
    return {"marker": marker, "markeredgecolor": light("page"), "markeredgewidth": 0.8, **look}


def _settled(lines: Sequence[Line]) -> Sequence[Line]:
    """The lines without what is before the last point that is early and outside of the range."""
    if max(len(line.points) for line in lines) < _FEW_POINTS:
        return lines
    xs = [x for line in lines for x, _ in line.points]
    start = min(xs) + (max(xs) - min(xs)) / 5
    late = [y for line in lines for x, y in line.points if x >= start]
    slack = (max(late) - min(late)) / 4
    low, high = min(late) - slack, max(late) + slack
    settled = []
    for line in lines:
        far = (i for i, (x, y) in enumerate(line.points) if x < start and not low <= y <= high)
        first = max(far, default=-1) + 1
        settled.append(replace(line, points=line.points[first:], band=line.band[first:]))
    return [line for line in settled if line.points]


def _spread(axes: Axes, lines: Sequence[Line]) -> list[tuple[float, Line]]:
    """The heights of the labels at the ends of lines, moved apart so that none covers another."""
    low, high = axes.get_ylim()
    floor = _HEIGHT - _BOTTOM
    ends = [floor - (line.points[-1][1] - low) / (high - low) * (floor - _TOP) for line in lines]
    placed: list[tuple[float, Line]] = []
    at = float(_TOP - _LABEL_HEIGHT)
    for wanted, line in sorted(zip(ends, lines, strict=True), key=lambda e: (e[0], e[1].label)):
        at = max(wanted, at + _LABEL_HEIGHT)
        placed.append((at, line))
    limit = float(floor + _LABEL_HEIGHT)
    for i in reversed(range(len(placed))):
        limit = min(placed[i][0], limit - _LABEL_HEIGHT)
        placed[i] = limit, placed[i][1]
    return placed


# ------------------------------------------------------------------ rows


@dataclass(frozen=True)
class ChartRow:
    """A row of a bar chart or of a dot chart."""

    label: str  # at the left
    value: float  # where the mark is
    style: Style  # of its method
    text: str  # at the right: the number as it is shown
    ring: float | None = None  # where a second mark is, if there is one
    dots: Sequence[float] = ()  # small marks, one per seed
    interval: Point | None = None  # the ends of a horizontal line
    strong: bool = False  # whether label and text are bold


def bar_chart(name: str, title: str, rows: Sequence[ChartRow]) -> Chart:
    """Bars from 0 to 1 with their numbers."""

    def draw(panel: Panel) -> None:
        axes = _row_axes(panel, rows)
        colours = [light(row.style.colour) for row in rows]
        axes.barh(range(len(rows)), [row.value for row in rows], height=0.6, color=colours)
        axes.set(xlim=(0, 1), xticks=[])
        axes.spines["left"].set_visible(True)

    data = [{"row": row.label, "value": row.value} for row in rows]
    return Chart(name, title, _described(title, rows), _floor(rows) + 4, draw, data)


def _described(title: str, rows: Sequence[ChartRow]) -> str:
    return f"{title}: {'; '.join(f'{row.label} {row.text}' for row in rows)}."


def dot_chart(
    name: str, title: str, x: Axis, rows: Sequence[ChartRow], *, level: float | None = None
) -> Chart:
    """Marks on a horizontal scale, one row per method; ``level`` draws this value of x.

    An arrow is a row far outside of the scale.
    """
    near = _without_outliers(rows)

    def draw(panel: Panel) -> None:
        axes = _row_axes(panel, rows)
        axes.grid(axis="x")
        axes.set_xlabel(x.label)
        if level is not None:
            axes.axvline(level, **_GUIDE)
        for at, row in enumerate(rows):
            if row in near:
                _draw_row(axes, row, at)
        axes.margins(x=0.05)
        axes.set_xlim(x.low, x.high)
        axes.xaxis.set_major_locator(_ticks(3))
        low, high = axes.get_xlim()
        for at, row in enumerate(rows):
            if row not in near:
                end, marker = (low, "<") if row.value < low else (high, ">")
                axes.plot(end, at, marker=marker, **_mark(row), markersize=9)

    data = [datum for row in rows for datum in _row_data(row)]
    text = _described(f"{title}, {x.label}", rows)
    return Chart(name, title, text, _floor(rows) + 42, draw, data, len(near) < len(rows))


def _row_axes(panel: Panel, rows: Sequence[ChartRow]) -> Axes:
    """Axes with a row for each label, which is at the left, and its number at the right."""
    labels = [cut(row.label) for row in rows]
    left = max(map(len, labels)) * _CHARACTER + 12
    right = WIDTH - 10 - max(len(row.text) for row in rows) * 7.0
    axes = panel.axes(left, _TOP - 12, right, _floor(rows))
    axes.spines["bottom"].set_visible(False)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), labels)
    for at, (row, label) in enumerate(zip(rows, axes.get_yticklabels(), strict=True)):
        weight = "bold" if row.strong else "normal"
        label.set(color=light("text"), size=12, weight=weight)
        height = _TOP + _ROW_HEIGHT * at + 4
        panel.text(WIDTH, height, row.text, ha="right", size=12, weight=weight)
    return axes


def cut(label: str) -> str:
    """The label of a row, shortened if it is long.

    The last words are kept if they fit: variants of a method begin alike.
    """
    if len(label) <= _LONGEST_ROW:
        return label
    first, *others = label.split()
    for start in range(1, len(others)):
        short = " ".join([first, "…", *others[start:]])
        if len(short) <= _LONGEST_ROW:
            return short
    return label[: _LONGEST_ROW - 1] + "…"


def _floor(rows: Sequence[ChartRow]) -> int:
    return _TOP + _ROW_HEIGHT * (len(rows) - 1) + 12


def _mark(row: ChartRow) -> dict[str, Any]:
    return {"color": light(row.style.colour), "gid": f"mark:{row.label}", "clip_on": False}


def _draw_row(axes: Axes, row: ChartRow, at: int) -> None:
    look, marker = _mark(row), MARKERS[row.style.marker]
    span = row.interval if row.ring is None else (row.ring, row.value)
    if span is not None:
        axes.plot(span, (at, at), **look, linewidth=2, alpha=0.45)
    hollow = {"markerfacecolor": light("page"), "markeredgecolor": look["color"]}
    if row.ring is not None:
        axes.plot(row.ring, at, marker=marker, **look, **hollow, markersize=9, markeredgewidth=1.6)
    if row.dots:
        hollow |= {"markerfacecolor": "none", "markersize": 5.2, "alpha": 0.75}
        axes.plot(row.dots, [at] * len(row.dots), "o", **look, **hollow, markeredgewidth=1.1)
    axes.plot(row.value, at, marker=marker, **look, markersize=10, markeredgecolor=light("page"))


def _row_data(row: ChartRow) -> Iterator[Datum]:
    low, high = row.interval or (None, None)
    yield {"row": row.label, "mark": "value", "value": row.value, "low": low, "high": high}
    if row.ring is not None:
        yield {"row": row.label, "mark": "hollow", "value": row.ring}
    for dot in row.dots:
        yield {"row": row.label, "mark": "seed", "value": dot}


def _without_outliers(rows: Sequence[ChartRow]) -> list[ChartRow]:
    """The rows whose value is at most six times the distance of the quartiles outside of them.

    With fewer than five rows nothing is far.
    """
    if len(rows) < 5:
        return list(rows)
    first, _, third = quantiles([row.value for row in rows], n=4)
    far = 6 * (third - first)
    return [row for row in rows if first - far <= row.value <= third + far]
