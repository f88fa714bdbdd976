"""Tables: what people read, and what programs read."""

from __future__ import annotations

import csv
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labo.lab.tables import (
    Cell,
    Column,
    Row,
    Table,
    to_csv,
    to_json,
    to_latex,
    to_markdown,
    to_terminal,
    write_table,
)

TABLE = Table(
    "digits: two methods",
    [
        Column("accuracy", "accuracy %", "test", scale=100),
        Column("delta", "Δ", "test", scale=100, signed=True),
        Column("time", "time", suffix="x"),
        Column("seconds", "seconds", printed=False),
    ],
    [
        Row("base", {"accuracy": Cell(0.98, 0.005), "time": Cell(1.0), "seconds": Cell(12.5)}),
        Row(
            "labo_x & 5 %",
            {"accuracy": Cell(0.99, paper=Cell(0.7105)), "delta": Cell(0.01), "time": Cell()},
            ruled=True,
        ),
    ],
    notes=["measured on 2 cores"],
)


def test_markdown():
    assert to_markdown(TABLE) == (
        "digits: two methods\n\n"
        "| method       | test accuracy % | test Δ |  time |\n"
        "| ------------ | --------------: | -----: | ----: |\n"
        "| base         |    98.00 ± 0.50 |      - | 1.00x |\n"
        "| labo_x & 5 % |   99.00 [71.05] |  +1.00 |     - |\n"
        "\n- measured on 2 cores\n"
    )


def test_a_bar_in_a_label_does_not_make_a_column():
    lines = to_markdown(Table("", [Column("a", "a")], [Row("x|y", {})])).splitlines()
    assert lines[-1] == r"| x\|y   |  - |"


def test_latex():
    assert to_latex(TABLE).splitlines() == [
        r"\begin{table}",
        r"\centering\small",
        r"\caption{digits: two methods}",
        r"\begin{tabular}{lrrr}",
        r"\toprule",
        r" & \multicolumn{2}{c}{test} & \multicolumn{1}{c}{} \\",
        r"\cmidrule(lr){2-3}",
        r"method & accuracy \% & $\Delta$ & time \\",
        r"\midrule",
        r"base & 98.00{\tiny $\pm$ 0.50} & - & 1.00x \\",
        r"\midrule",
        r"labo\_x \& 5 \% & 99.00 [71.05] & +1.00 & - \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\par\footnotesize measured on 2 cores",
        r"\end{table}",
    ]


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("a\\b", r"a\textbackslash{}b"),
        ("50 % of $x_1$ #2 {a}", r"50 \% of \$x\_1\$ \#2 \{a\}"),
        ("~^", r"\textasciitilde{}\textasciicircum{}"),
        ("1 ± 2 ×", r"1 $\pm$ 2 $\times$"),
    ],
)
def test_latex_has_no_bare_special_character(text, escaped):
    assert f"\\caption{{{escaped}}}" in to_latex(Table(text, [], []))


def test_csv_and_json_have_everything_unrounded():
    header, base, labo = csv.reader(io.StringIO(to_csv(TABLE)))
    assert header == [
        *("method", "accuracy", "accuracy_std", "accuracy_paper", "delta", "time", "seconds")
    ]
    assert base == ["base", "0.98", "0.005", "", "", "1.0", "12.5"]
    assert labo == ["labo_x & 5 %", "0.99", "", "0.7105", "0.01", "", ""]
    document = json.loads(json.dumps(to_json(TABLE)))
    assert document["rows"][0]["cells"]["accuracy"] == {"value": 0.98, "std": 0.005}
    assert document["rows"][1]["cells"]["accuracy"]["paper"] == {"value": 0.7105}
    assert document["rows"][1]["cells"]["seconds"] == {"value": None}


numbers = st.floats(allow_nan=False, allow_infinity=False)
labels = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1)


@given(st.dictionaries(labels, st.tuples(numbers, numbers | st.none()), min_size=1))
def test_csv_survives_the_round_trip(content):
    rows = [Row(label, {"a": Cell(*pair)}) for label, pair in content.items()]
    found = list(csv.DictReader(io.StringIO(to_csv(Table("", [Column("a", "a")], rows)))))
    for line, (label, (value, spread)) in zip(found, content.items(), strict=True):
        assert line["method"] == label
        assert float(line["a"]) == value
        assert (float(text) if (text := line.get("a_std")) else None) == spread


def test_the_four_files_are_written(tmp_path):
    write_table(TABLE, tmp_path / "table")
    assert {path.name for path in tmp_path.iterdir()} == {
        f"table.{suffix}" for suffix in ("md", "tex", "csv", "json")
    }


def test_a_table_for_the_terminal_fits_and_has_everything():
    columns = [Column(f"c{i}", f"column {i}", digits=1) for i in range(9)]
    rows = [Row(name, {f"c{i}": Cell(i / 2) for i in range(9)}) for name in ("base", "labo")]
    table = Table("caption", columns, rows, notes=["a note " * 20])
    for width in (40, 80, 200):
        text = to_terminal(table, width)
        assert max(map(len, text.splitlines())) <= width
        assert all(f"column {i}" in text for i in range(9))
        assert "3.5" in text
        assert text.count("base") == text.count("method") > (width < 100)
