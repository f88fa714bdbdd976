"""The paper's tables and figures in the paper's layout, with the paper's number in every cell.

``EXHIBITS`` lists them. ``Trained`` has the runs they are made of. Nothing here trains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..analysis.groups import mean_cell
from ..analysis.run import load_analysis
from ..compare.table import NO_RUNS, ComparedRow
from ..report.figures import label_figure
from ..report.gather import make_groups, read_runs
from ..tables import Cell, Column, Row, Table
from ..text.token_text import token_names
from ..translation.frequency import BINS
from ..translation.report import histogram_figure
from . import paper

_GROUPS = {
    "iwslt14": "IWSLT'14",
    "wmt14": "WMT'14",
    "cifar100": "CIFAR100",
    "cifar10": "CIFAR10",
    "imagenet": "ImageNet",
}
_NETWORKS = {
    "mobilenet-v2": "MobileNetv2",
    "resnet18": "ResNet18",
    "resnet50": "ResNet50",
    "resnet152": "ResNet152",
}
_ANALYSED = "iwslt14-de-en"  # the experiment of the paper's Discussion


@dataclass(frozen=True)
class Trained:
    """The runs of an exhibit: experiment -> method -> row, as far as there are any."""

    rows: Mapping[str, Mapping[str, ComparedRow]]

    def row(self, experiment: str, method: str) -> ComparedRow:
        """The runs of a method; a row without any if it was not trained."""
        return self.rows.get(experiment, {}).get(method, NO_RUNS)

    def analysed(self, experiment: str, method: str, *keys: str) -> dict[int, float]:
        """Seed -> a number of the analysis of its run, given by its keys in ``analysis.json``."""
        numbers = {}
        for seed, member in self.row(experiment, method).scored.items():
            value: Any = load_analysis(member.run.path)
            for key in keys:
                value = None if value is None else value.get(key)
            if value is not None:
                numbers[seed] = float(value)
        return numbers

    def paths(self, experiment: str, *methods: str) -> list[Path]:
        """The run directories of methods."""
        rows = (self.row(experiment, method) for method in methods)
        return [member.run.path for row in rows for member in row.scored.values()]


@dataclass(frozen=True)
class Exhibit:
    """A table or figure of the paper."""

    caption: str  # what it shows
    methods: tuple[str, ...]  # its rows, as in the paper
    experiments: tuple[str, ...]  # what is trained; names of ``EXPERIMENTS``
    lay_out: Callable[[Trained], tuple[list[Column], list[Row]]]  # makes the columns and rows
    seeds: int  # at the scale of the paper
    demo_seeds: int = 1  # in the demo
    grid: tuple[str, ...] = ()  # the hyper-parameters that the paper searched, for ``compare.plan``
    notes: tuple[str, ...] = ()  # below the table
    draw: Callable[[Trained, Path], None] | None = (
        None  # writes the figure to a path without suffix
    )


def _beside(ours: Cell, value: float | None, spread: float | None = None) -> Cell:
    return replace(ours, paper=Cell(value, spread))


# ------------------------------------------------------------------ tables


def _bilingual(trained: Trained) -> tuple[list[Column], list[Row]]:
    columns = []
    for name in paper.BILINGUAL_COLUMNS:
        corpus, _, pair = name.partition("-")
        columns.append(Column(name, pair.upper(), _GROUPS[corpus]))
        columns.append(Column(f"{name}-sacrebleu", "sacreBLEU", _GROUPS[corpus], printed=False))
    rows = []
    for method, numbers in paper.BILINGUAL.items():
        cells = {}
        for name, number in zip(paper.BILINGUAL_COLUMNS, numbers, strict=True):
            cells[name] = _beside(trained.row(name, method).cell("tokenized_bleu"), *number)
            cells[f"{name}-sacrebleu"] = trained.row(name, method).cell("bleu")
        rows.append(Row(paper.ROWS[method], cells, ruled=method == "labo"))
    return columns, rows


def _multilingual(trained: Trained) -> tuple[list[Column], list[Row]]:
    pairs = paper.MULTILINGUAL_COLUMNS
    rows = []
    for method, numbers in paper.MULTILINGUAL.items():
        cells = {
            pair: _beside(
                _mean(trained.analysed("iwslt17", method, "splits", "test", "pairs", pair, "bleu")),
                number,
            )
            for pair, number in zip(pairs, numbers, strict=True)
        }
        rows.append(Row(paper.ROWS[method], cells))
    return [Column(pair, pair.upper(), "IWSLT'17") for pair in pairs], rows


def _classifiers(
    names: Sequence[str], printed: Mapping[str, Sequence[paper.Score]]
) -> Callable[[Trained], tuple[list[Column], list[Row]]]:
    def lay_out(trained: Trained) -> tuple[list[Column], list[Row]]:
        columns = []
        for name in names:
            data, _, network = name.partition("-")
            columns.append(Column(name, _NETWORKS[network], _GROUPS[data], scale=100))
            columns.append(Column(f"{name}-time", "time", _GROUPS[data], digits=1, suffix="x"))
        rows = []
        for method, numbers in printed.items():
            cells = {}
            for name, (accuracy, time) in zip(names, numbers, strict=True):
                cells[name] = _beside(trained.row(name, method).cell("accuracy"), accuracy / 100)
                cells[f"{name}-time"] = _beside(Cell(trained.row(name, method).time().value), time)
            rows.append(Row(paper.ROWS[method], cells, ruled=method in ("ls", "labo")))
        return columns, rows

    return lay_out


def _frequency(trained: Trained) -> tuple[list[Column], list[Row]]:
    parts = paper.FREQUENCY_COLUMNS
    rows = []
    for split, printed in paper.FREQUENCY.items():
        bleu = {
            (method, part): trained.analysed(
                _ANALYSED, method, "splits", split, "frequency", part, "bleu"
            )
            for method in printed
            for part in parts
        }
        theirs = {m: dict(zip(parts, numbers, strict=True)) for m, numbers in printed.items()}
        for method in printed:
            cells = {
                part: _beside(_mean(bleu[method, part]), theirs[method][part]) for part in parts
            }
            label = f"{split}: {paper.ROWS[method]}"
            rows.append(Row(label, cells, ruled=(split, method) == ("test", "ls")))
        differences = {}
        for part in parts:
            labo, ls = bleu["labo", part], bleu["ls", part]
            paired = mean_cell(labo[seed] - ls[seed] for seed in labo if seed in ls)
            differences[part] = _beside(paired, theirs["labo"][part] - theirs["ls"][part])
        rows.append(Row(f"{split}: Δ", differences))
    return [Column(part, part.capitalize()) for part in parts], rows


def _mean(numbers: Mapping[int, float]) -> Cell:
    return mean_cell(numbers.values())


# ------------------------------------------------------------------ figures


def _one_label(trained: Trained) -> tuple[list[Column], list[Row]]:
    kinds = {"one_hot": "one-hot", "ls": "LS", "labo": "LABO", "prediction": "model"}
    rows = []
    labels = [load_analysis(path)["labels"] for path in trained.paths(_ANALYSED, "labo")]
    for shown in (samples[0] for samples in labels[:1] if samples):
        for index, name in enumerate(token_names(shown["classes"])):
            label = f"{name} (target)" if index == shown["target"] else name
            rows.append(Row(label, {kind: Cell(shown[kind][index]) for kind in kinds}))
        rest = {kind: Cell(shown["rest"][kind]) for kind in kinds}
        rows.append(Row("all others", rest, ruled=True))
    return [Column(kind, heading, digits=3) for kind, heading in kinds.items()], rows


def _peaks(trained: Trained) -> tuple[list[Column], list[Row]]:
    parts = ("all", *paper.FREQUENCY_COLUMNS)
    rows = []
    for method, peak in paper.PEAKS.items():
        cells = {}
        for part in parts:
            keys = ("splits", "test", "confidence")
            ours = _mean(trained.analysed(_ANALYSED, method, *keys, "peak", part))
            cells[part] = _beside(ours, peak)
            cells[f"{part}-mean"] = _mean(trained.analysed(_ANALYSED, method, *keys, "mean", part))
        rows.append(Row(paper.ROWS[method], cells))
    columns = [Column(part, part, "peak") for part in parts]
    return columns + [Column(f"{part}-mean", part, "mean") for part in parts], rows


def _draw_label(trained: Trained, stem: Path) -> None:
    for listing in read_runs(trained.paths(_ANALYSED, "labo")[:1]):
        if listing.member and (figure := label_figure(listing.member, stem.name, token_names)):
            figure.write(stem, (".svg", ".pdf"))


def _draw_histograms(trained: Trained, stem: Path) -> None:
    listings = read_runs(trained.paths(_ANALYSED, "ls", "labo"))
    for group in make_groups([listing.member for listing in listings if listing.member]):
        for figure in histogram_figure(group, stem.name):
            figure.write(stem, (".svg", ".pdf"))


# ------------------------------------------------------------------ the list

_BLEU = "BLEU is tokenized BLEU, as in the paper; sacreBLEU is in the CSV and JSON files"
_KD = "time of KD: without training its teacher, which the paper's number seems to include"
_TAU = ("labo.tau=1.15,1.25",)

EXHIBITS: dict[str, Exhibit] = {
    "table1": Exhibit(
        "Table 1: BLEU on bilingual translation, beam 5",
        tuple(paper.BILINGUAL),
        paper.BILINGUAL_COLUMNS,
        _bilingual,
        seeds=5,
        grid=_TAU,
        notes=(_BLEU, "the paper does not give the number of runs of its means"),
    ),
    "table2": Exhibit(
        "Table 2: BLEU of one multilingual model",
        tuple(paper.MULTILINGUAL),
        ("iwslt17",),
        _multilingual,
        seeds=1,
        grid=_TAU,
    ),
    "table3": Exhibit(
        "Table 3: test accuracy in percent and relative training time",
        tuple(paper.CIFAR),
        paper.CIFAR_COLUMNS,
        _classifiers(paper.CIFAR_COLUMNS, paper.CIFAR),
        seeds=5,
        demo_seeds=3,
        notes=(_KD, "alpha and tau of KD are those of the recipe; the paper searched 16 pairs"),
    ),
    "table4": Exhibit(
        "Table 4: BLEU by word frequency, German to English",
        ("ls", "labo"),
        (_ANALYSED,),
        _frequency,
        seeds=1,
        grid=_TAU,
        notes=("ours: sacreBLEU on equal thirds; the paper cut slices of 2400 sentences",),
    ),
    "figure1": Exhibit(
        "Figure 1c: the label of one word in three methods",
        ("labo",),
        (_ANALYSED,),
        _one_label,
        seeds=1,
        grid=_TAU,
        draw=_draw_label,
    ),
    "figure2": Exhibit(
        "Figure 2: the mode of the probabilities of the tokens chosen by beam search",
        ("ls", "labo"),
        (_ANALYSED,),
        _peaks,
        seeds=1,
        grid=_TAU,
        notes=(f'peak: the middle of the fullest of {BINS} bins; the paper says "around"',),
        draw=_draw_histograms,
    ),
    "imagenet": Exhibit(
        "ImageNet: validation accuracy in percent and relative training time",
        tuple(paper.IMAGENET),
        paper.IMAGENET_COLUMNS,
        _classifiers(paper.IMAGENET_COLUMNS, paper.IMAGENET),
        seeds=1,
        demo_seeds=3,
    ),
}


def make_table(exhibit: Exhibit, trained: Trained, notes: Sequence[str]) -> Table:
    """The exhibit as a table: our number, and in brackets that of the paper."""
    columns, rows = exhibit.lay_out(trained)
    brackets = (
        "in brackets: the paper's number"
        if any(cell.paper for row in rows for cell in row.cells.values())
        else "the paper prints no numbers here"
    )
    return Table(exhibit.caption, columns, rows, notes=(brackets, *exhibit.notes, *notes))
