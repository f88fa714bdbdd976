"""Charts: what is drawn, and the same as files."""

from __future__ import annotations

import csv
import io
import re
from itertools import pairwise
from xml.etree import ElementTree

import matplotlib
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labo.lab.report.charts import (
    Axis,
    Chart,
    ChartRow,
    Line,
    cut,
    dot_chart,
    line_chart,
    sheet,
    swatch,
)
from labo.lab.report.palette import COLOURS, Style, styles

STYLE = Style("m0")


def drawn(chart: Chart) -> Axes:
    """The axes of a chart that is drawn alone."""
    figure = Figure(figsize=(5, chart.height / 72))
    chart.draw_at(figure, 0, 0)
    (axes,) = figure.axes
    return axes


def lines(*found: Line, **options) -> Chart:
    return line_chart("c", "t", "d", Axis("x"), Axis("y"), found, **options)


def test_twelve_methods_have_twelve_markers():
    names = [(name, 0) for name in ("base", "ls", "labo", *(f"other{i}" for i in range(8)))]
    found = styles([*names, ("labo", 1)])
    assert len({style.marker for style in found.values()}) == 12
    assert len({(style.colour, style.dash) for style in found.values()}) == 12


def test_a_method_far_from_the_others_does_not_squeeze_the_scale():
    rows = [ChartRow(f"m{i}", 98 + i / 10, STYLE, "") for i in range(8)]
    assert not dot_chart("c", "t", Axis("x"), rows).cut
    wide = dot_chart("c", "t", Axis("x"), [*rows, ChartRow("far", 20.0, STYLE, "20")])
    low, _ = drawn(wide).get_xlim()
    assert low > 90
    assert ">20</text>" in wide.svg
    assert wide.cut


def test_the_first_steps_do_not_squeeze_the_scale():
    points = [(0, 900.0), (5, 300.0), *((x, 1 + 1 / x) for x in range(10, 101, 5))]
    curve = Line(points, STYLE, "a")
    axes = drawn(lines(curve, settled=True))
    assert axes.get_ylim()[1] < 2
    assert 16 <= len(axes.lines[0].get_xdata()) <= 19  # of 21
    assert len(lines(curve, settled=True).data) == 21  # the data are whole
    few = Line([(0, 90.0), (10, 3.0), (20, 2.0), (30, 1.0)], STYLE, "a")
    assert len(drawn(lines(few, settled=True)).lines[0].get_xdata()) == 4
    flat = Line([(0, 1.0), (100, 1.0)], STYLE, "a")
    low, high = drawn(lines(flat, settled=True)).get_ylim()
    assert low < 1 < high


def test_a_line_of_one_point_with_any_name_can_be_drawn():
    chart = lines(Line([(5, 0.0)], STYLE, "a & $b$ 犬", "a & $b$ 犬"))
    assert "nan" not in chart.svg
    assert 'data-series="a &amp; $b$ 犬"' in chart.svg
    assert ">a &amp; $b$ 犬</text>" in chart.svg
    assert sheet([chart])[".pdf"].startswith(b"%PDF")  # no warning of a letter that the font lacks


def test_labels_at_the_ends_do_not_cover_each_other():
    found = [Line([(0, 0), (1, 0.5 + i / 1000)], STYLE, f"n{i}", f"n{i}") for i in range(7)]
    texts = re.findall(r'y="([\d.]+)"[^>]*>n\d</text>', lines(*found).svg)
    heights = sorted(map(float, texts))
    assert len(heights) == 7
    assert min(b - a for a, b in pairwise(heights)) >= 13.9


def test_a_chart_of_a_page_has_the_colours_of_the_page_and_small_marks_of_its_own():
    band = Line([(0, 0.0), (1, 1.0)], Style("m1"), "#0072b2 1.23456", band=[(0, 0), (1, 2)])
    svg = lines(band).svg
    assert "stroke: var(--m1)" in svg
    assert not re.search(r'style="[^"]*#[0-9a-f]{6}', svg)
    assert '<g class="band" data-series="#0072b2 1.23456">' in svg
    assert len(svg) < 6000
    assert not re.search(r"https?:|url\(|<!--", svg)
    ElementTree.fromstring(svg)
    mark = re.compile(r' id="(m\w+)"')
    other = line_chart("other", "t", "d", Axis("x"), Axis("y"), [band]).svg
    assert set(mark.findall(svg)).isdisjoint(mark.findall(other))
    assert " id=" not in swatch(Style("m1"))


def test_a_sheet_is_a_file_of_its_own_in_the_light_colours():
    line = Line([(0, 0.5), (1, 1.0)], Style("m1"), "a < b", "a < b", band=[(0, 1), (1, 1)])
    charts = [line_chart(n, n, "d", Axis("step"), Axis("y"), [line]) for n in ("one", "two")]
    charts.append(dot_chart("dots", "dots", Axis("x"), [ChartRow("a", 1, STYLE, "1", ring=2)]))
    legend = [(Style("m1"), f"a method with a long name, lr {i}") for i in range(5)]
    files = sheet(charts, legend, columns=2)
    assert files == sheet(charts, legend, columns=2)
    svg = files[".svg"].decode()
    light, dark = COLOURS["m1"]
    assert light in svg
    assert dark not in svg
    root = ElementTree.fromstring(svg)
    assert root.get("width") == "768pt"
    texts = {t.text: (t.get("x"), t.get("y")) for t in root.iter() if t.tag.endswith("}text")}
    assert {"one", "two", "dots", *(name for _, name in legend)} <= texts.keys()
    assert texts["one"][1] == texts["two"][1] != texts["dots"][1]
    assert max(float(y) for _, y in texts.values()) < float(root.get("height", "")[:-2])
    assert files[".pdf"].startswith(b"%PDF")
    assert b"CreationDate" not in files[".pdf"]
    rows = list(csv.DictReader(io.StringIO(files[".csv"].decode())))
    assert rows[0] | {"row": "", "mark": "", "value": ""} == rows[0]
    wanted = {"chart": "one", "series": "a < b", "step": "0", "y": "0.5", "low": "0", "high": "1"}
    assert wanted.items() <= rows[0].items()
    assert [(r["row"], r["mark"], r["value"]) for r in rows[4:]] == [
        ("a", "value", "1"),
        ("a", "hollow", "2"),
    ]


def test_the_settings_of_a_user_change_nothing():
    chart = lines(Line([(0, 0.0), (1, 1.0)], STYLE, "a"))
    before = chart.svg
    with matplotlib.rc_context({"axes.grid": False, "lines.linewidth": 9, "font.size": 30}):
        assert chart.svg == before


def test_long_labels_keep_the_words_in_which_variants_differ():
    labels = [f"labo alpha=adaptive tau=1.25 optim.lr={lr}" for lr in (0.1, 0.2)]
    assert [cut(label) for label in labels] == ["labo … optim.lr=0.1", "labo … optim.lr=0.2"]
    assert cut("cs-kd") == "cs-kd"
    assert cut("x" * 40) == "x" * 23 + "…"
    chart = dot_chart("c", "t", Axis("x"), [ChartRow(labels[0], 1.0, STYLE, "1")])
    assert ">labo … optim.lr=0.1</text>" in chart.svg
    assert f'data-series="{labels[0]}"' in chart.svg  # as in the charts of lines
    assert chart.data[0]["row"] == labels[0]


@pytest.mark.parametrize("low", [0.0, None])
def test_an_axis_begins_where_it_is_told(low):
    line = Line([(450, 1.0), (900, 2.0)], STYLE, "a")
    axes = drawn(line_chart("c", "t", "d", Axis("step", low=low), Axis("y"), [line]))
    assert axes.get_xlim() == ((450 if low is None else low), 900)
