"""compare, analyze, report and reproduce print the same groups, differences and p-values."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sacrebleu

from analysis_runs import image_records, sentence, write_lines
from labo import cli
from labo.lab.analysis.collection import claim_folder
from labo.lab.analysis.significance import paired_bootstrap, paired_difference
from labo.lab.compare.plan import PlannedRun
from labo.lab.reproduce.command import plan
from labo.lab.translation.bleu import bootstrap_bleu

# (method, reference) -> difference, its interval, p over seeds, p over examples: as printed
Printed = dict[tuple[str, str], tuple[str, str | None, str | None, str | None]]


def run_command(capsys: Any, *arguments: object) -> str:
    with pytest.raises(SystemExit) as end:
        cli.main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    assert end.value.code in (0, None), printed.err
    return printed.out


def expected_text(difference: dict[str, Any], scale: float, p_bootstrap: float | None) -> Any:
    """A difference as all commands are to print it."""
    interval = difference["interval"]
    shown = (
        None if interval is None else "({:+.2f}, {:+.2f})".format(*(scale * x for x in interval))
    )
    p = None if difference["p"] is None else f"{difference['p']:.3f}"
    over_examples = None if p_bootstrap is None else f"{p_bootstrap:.3f}"
    return f"{scale * difference['mean']:+.2f}", shown, p, over_examples


# ------------------------------------------------------------------ what each command printed


def markdown_tables(text: str) -> list[tuple[list[str], list[list[str]]]]:
    """The tables of a text: the headings of each, and the cells of its rows."""
    found = []
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.M):
        lines = [
            [cell.strip() for cell in line.strip("|").split(" | ")] for line in block.splitlines()
        ]
        found.append((lines[0], lines[2:]))
    return found


def parts(cell: str) -> tuple[str, str | None]:
    """``+1.00 (+0.50, +1.50)`` as the difference and its interval."""
    value, _, interval = cell.replace("−", "-").replace("\N{NO-BREAK SPACE}", " ").partition(" ")
    return value, interval or None


def number(cell: str | None) -> str | None:
    return None if cell in (None, "-", "−") else f"{float(cell):.3f}"


def of_columns(headings: list[str], rows: list[list[str]]) -> Printed:
    """Differences from a table with a row per method and columns ``Δ REFERENCE``."""
    found: Printed = {}
    for cells in rows:
        method = cells[0].partition(" (")[0]
        for index, heading in enumerate(headings):
            if heading.startswith("Δ ") and cells[index] not in ("-", "−"):
                after = dict(zip(headings[index + 1 : index + 3], cells[index + 1 :], strict=False))
                p = number(after["p"]) if headings[index + 1] == "p" else None
                position = index + 1 + (headings[index + 1] == "p")
                bootstrapped = headings[position : position + 1] == ["p examples"]
                over_examples = number(cells[position]) if bootstrapped else None
                found[method, heading[2:]] = (*parts(cells[index]), p, over_examples)
    return found


def of_rows(headings: list[str], rows: list[list[str]]) -> Printed:
    """Differences from a table with a row per method and reference."""
    found: Printed = {}
    for cells in rows:
        row = dict(zip(headings, cells, strict=True))
        method, _, reference = cells[0].rpartition(": ")[2].partition(" - ")
        method = method.partition(" (")[0]
        (delta,) = (cell for heading, cell in row.items() if heading.startswith("Δ "))
        found[method, reference] = (
            *parts(delta),
            number(row.get("p")),
            number(row.get("p examples")),
        )
    return found


class ResultsTable(HTMLParser):
    """The headings and rows of the first results table of a report."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.feed(page[page.index('id="results-title"') :].partition("</table>")[0])

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.strip()


def printed_by_all(
    capsys: Any, out: Path, exhibit: str, seeds: int, compare: list[str], runs: list[Path]
) -> dict[str, Printed]:
    reproduced = markdown_tables(
        run_command(capsys, "reproduce", exhibit, "--seeds", seeds, "--out", out)
    )
    compared = markdown_tables(run_command(capsys, "compare", *compare, "--seeds", seeds))
    analysed = markdown_tables(run_command(capsys, "analyze", *runs))
    run_command(capsys, "report", *runs, "-o", out / "report.html")
    headings, *rows = ResultsTable((out / "report.html").read_text(encoding="utf-8")).rows
    folder = runs[0].parent.name
    own = [row for row in reproduced[1][1] if row[0].startswith(f"{folder}: ")]
    return {
        "reproduce": of_rows(reproduced[1][0], own),
        "compare": of_columns(*compared[0]),
        "analyze": of_rows(*analysed[1]),
        "report": of_columns(headings, rows),
    }


def finish(run: PlannedRun, scores: dict[str, float]) -> None:
    run.directory.start(run.recipe)
    run.directory.records.mkdir(exist_ok=True)
    signature = f"labo:0|data:{run.path.parent.name}@1|seed:{run.seed}"
    results = {"valid": scores, "test": scores, "signature": signature}
    run.directory.finish({**results, "steps": 10, "seconds": 5.0})


# ------------------------------------------------------------------ the tests


def test_images(tmp_path, capsys):
    planned = plan("table3", "demo", out=tmp_path, seeds=3)
    claim_folder(tmp_path)
    labels = np.arange(40) % 4
    right: dict[tuple[str, str, int], int] = {}
    random = np.random.default_rng(0)
    for comparison in planned.all():
        for run in comparison.runs:
            count = int(random.integers(25, 39))
            predicted = np.where(np.arange(40) < count, labels, (labels + 1) % 4)
            p = np.full((40, 4), 0.1)
            p[np.arange(40), predicted] = 0.7
            finish(run, {"accuracy": count / 40, "nll": 0.5})
            for split in ("valid", "test"):
                write_lines(run.directory.records / f"{split}.jsonl", image_records(p, labels))
            right[comparison.out.name, run.variant.method, run.seed] = count
    (comparison,) = (c for c in planned.all() if c.out.name == "digits")
    methods = [variant.method for variant in comparison.variants]
    runs = [run.path for run in comparison.runs]
    compare = ["digits", "--methods", ",".join(methods), "--out", str(tmp_path / "digits")]
    found = printed_by_all(capsys, tmp_path, "table3", 3, compare, runs)
    expected = {}
    for reference in ("base", "ls"):
        for method in methods:
            if method != reference:
                ours, theirs = (
                    [right["digits", name, seed] / 40 for seed in range(3)]
                    for name in (method, reference)
                )
                difference = paired_difference(ours, theirs)
                expected[method, reference] = expected_text(difference, 100, None)
    assert len(expected) == 14
    for command, printed in found.items():
        assert printed == expected, command


TEXTS = [f"this is sentence number {i} of a small test set" for i in range(25)]


def test_translations(tmp_path, capsys):
    planned = plan("table2", "demo", out=tmp_path, seeds=2)
    claim_folder(tmp_path)
    (comparison,) = planned.all()
    outputs: dict[tuple[str, int], list[str]] = {}
    random = np.random.default_rng(1)
    shares = {"base": 0.3, "ls": 0.2, "labo": 0.15}
    for run in comparison.runs:
        share = shares[run.variant.method]
        lines = [
            " ".join("x" if random.random() < share else word for word in text.split())
            for text in TEXTS
        ]
        bleu = sacrebleu.corpus_bleu(lines, [TEXTS]).score
        selected = 50.0 if run.point == "tau=1.15" else 40.0
        finish(run, {"bleu": bleu, "chrf": 50.0, "nll": 1.0})
        results = json.loads(run.directory.results_file.read_text())
        results["valid"] = {"bleu": selected}
        run.directory.finish(results)
        records = [sentence(text, line) for text, line in zip(TEXTS, lines, strict=True)]
        for split in ("valid", "test"):
            write_lines(run.directory.records / f"{split}.jsonl", records)
        if run.point in ("", "tau=1.15"):
            outputs[run.variant.method, run.seed] = lines
    runs = [run.path for run in comparison.selected()]
    assert len(runs) == 6
    settings = ["data.languages=[de-en,fr-en]", "data.size=8000", "optim.warmup_steps=150"]
    compare = ["cldr", *settings, "--methods", "base,ls,labo:warmup_steps=200"]
    compare += ["--grid", "labo.tau=1.15,1.25", "--out", str(comparison.out)]
    found = printed_by_all(capsys, tmp_path, "table2", 2, compare, runs)
    drawn = {key: bootstrap_bleu(lines, TEXTS) for key, lines in outputs.items()}
    expected = {}
    for reference in ("base", "ls"):
        for method in shares:
            if method != reference:
                ours, theirs = (
                    [drawn[name, seed] for seed in (0, 1)] for name in (method, reference)
                )
                difference = paired_difference([d[0] for d in ours], [d[0] for d in theirs])
                p, _ = paired_bootstrap(ours, theirs)
                expected[method, reference] = expected_text(difference, 1, p)
    assert len(expected) == 4
    for command, printed in found.items():
        assert printed == expected, command
