"""The paper's tables and figures in the paper's layout, ours beside the paper's in every cell.

``EXHIBITS`` lists them; ``Found`` is what the runs say. Nothing here trains anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from ..analysis.run import load_analysis
from ..compare.table import Scored, cost, spread_of
from ..run import files as atomic
from ..tables import Cell, Column, Row, Table
from ..translation.confidence import BINS
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
_ANALYSED = "iwslt14-de-en"  # what the paper's Discussion is about


@dataclass(frozen=True)
class Found:
    """The runs behind an exhibit: experiment -> method -> scored runs, as far as there are any."""

    rows: Mapping[str, Mapping[str, Scored]]

    def score(self, experiment: str, method: str, metric: str) -> Cell:
        """A score on the test split."""
        scored = self.rows.get(experiment, {}).get(method)
        return spread_of(scored.test(metric).values()) if scored else Cell()

    def time(self, experiment: str, method: str) -> Cell:
        """The time of a training step relative to base."""
        rows = self.rows.get(experiment, {})
        return (
            cost(rows[method], rows["base"])["time"] if {method, "base"} <= rows.keys() else Cell()
        )

    def analysed(self, experiment: str, method: str, *keys: str) -> Cell:
        """A number of the analysis of each run, given by its keys in ``analysis.json``."""
        numbers = []
        for path in self.paths(experiment, method):
            value: Any = load_analysis(path)
            for key in keys:
                value = None if value is None else value.get(key)
            if value is not None:
                numbers.append(value)
        return spread_of(numbers)

    def paths(self, experiment: str, *methods: str) -> list[Path]:
        """The run directories of methods."""
        rows = self.rows.get(experiment, {})
        return [
            run.path
            for method in methods
            if method in rows
            for run in rows[method].choice.runs
            if run.seed in rows[method].results
        ]


@dataclass(frozen=True)
class Exhibit:
    """A table or figure of the paper.

    Attributes:
        caption: what it shows.
        methods: its rows, as in the paper.
        experiments: what is trained; see ``reproduce.EXPERIMENTS``.
        lay_out: makes columns and rows of what was found.
        seeds: how many at the paper's scale.
        demo_seeds: how many in the demo.
        grid: what the paper searched, for ``compare.plan``.
        notes: what a reader must know.
        draw: writes the figure, for a path without suffix.
    """

    caption: str
    methods: tuple[str, ...]
    experiments: tuple[str, ...]
    lay_out: Callable[[Found], tuple[list[Column], list[Row]]]
    seeds: int
    demo_seeds: int = 1
    grid: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    draw: Callable[[Found, Path], None] | None = None


def _beside(ours: Cell, value: float | None, spread: float | None = None) -> Cell:
    return replace(ours, paper=Cell(value, spread))


# ------------------------------------------------------------------ tables


def _bilingual(found: Found) -> tuple[list[Column], list[Row]]:
    columns = []
    for name in paper.BILINGUAL_COLUMNS:
        corpus, _, pair = name.partition("-")
        columns.append(Column(name, pair.upper(), _GROUPS[corpus]))
        columns.append(Column(f"{name}-sacrebleu", "sacreBLEU", _GROUPS[corpus], printed=False))
    rows = []
    for method, numbers in paper.BILINGUAL.items():
        cells = {}
        for name, number in zip(paper.BILINGUAL_COLUMNS, numbers, strict=True):
            cells[name] = _beside(found.score(name, method, "tokenized_bleu"), *number)
            cells[f"{name}-sacrebleu"] = found.score(name, method, "bleu")
        rows.append(Row(paper.ROWS[method], cells, ruled=method == "labo"))
    return columns, rows


def _multilingual(found: Found) -> tuple[list[Column], list[Row]]:
    pairs = paper.MULTILINGUAL_COLUMNS
    rows = []
    for method, numbers in paper.MULTILINGUAL.items():
        cells = {
            pair: _beside(
                found.analysed("iwslt17", method, "splits", "test", "pairs", pair, "bleu"), number
            )
            for pair, number in zip(pairs, numbers, strict=True)
        }
        rows.append(Row(paper.ROWS[method], cells))
    return [Column(pair, pair.upper(), "IWSLT'17") for pair in pairs], rows


def _classifiers(
    names: Sequence[str], printed: Mapping[str, Sequence[paper.Score]]
) -> Callable[[Found], tuple[list[Column], list[Row]]]:
    def lay_out(found: Found) -> tuple[list[Column], list[Row]]:
        columns = []
        for name in names:
            data, _, network = name.partition("-")
            columns.append(Column(name, _NETWORKS[network], _GROUPS[data], scale=100))
            columns.append(Column(f"{name}-time", "time", _GROUPS[data], digits=1, suffix="x"))
        rows = []
        for method, numbers in printed.items():
            cells = {}
            for name, (accuracy, time) in zip(names, numbers, strict=True):
                cells[name] = _beside(found.score(name, method, "accuracy"), accuracy / 100)
                cells[f"{name}-time"] = _beside(Cell(found.time(name, method).value), time)
            rows.append(Row(paper.ROWS[method], cells, ruled=method in ("ls", "labo")))
        return columns, rows

    return lay_out


def _frequency(found: Found) -> tuple[list[Column], list[Row]]:
    parts = paper.FREQUENCY_COLUMNS
    rows = []
    for split, printed in paper.FREQUENCY.items():
        cells: dict[str, dict[str, Cell]] = {}
        for method, numbers in printed.items():
            cells[method] = {
                part: _beside(
                    found.analysed(_ANALYSED, method, "splits", split, "frequency", part, "bleu"),
                    number,
                )
                for part, number in zip(parts, numbers, strict=True)
            }
            label = f"{split}: {paper.ROWS[method]}"
            rows.append(Row(label, cells[method], ruled=(split, method) == ("test", "ls")))
        rows.append(
            Row(
                f"{split}: Δ",
                {part: _minus(cells["labo"][part], cells["ls"][part]) for part in parts},
            )
        )
    return [Column(part, part.capitalize()) for part in parts], rows


def _minus(ours: Cell, theirs: Cell) -> Cell:
    """The difference of two cells and of the paper's beside them."""
    value = None if ours.value is None or theirs.value is None else ours.value - theirs.value
    return Cell(
        value, None, _minus(ours.paper, theirs.paper) if ours.paper and theirs.paper else None
    )


# ------------------------------------------------------------------ figures


def _one_label(found: Found) -> tuple[list[Column], list[Row]]:
    from ..report.embed import token_name

    kinds = {"one_hot": "one-hot", "ls": "LS", "labo": "LABO", "prediction": "model"}
    rows = []
    labels = [load_analysis(path)["labels"] for path in found.paths(_ANALYSED, "labo")]
    for shown in (samples[0] for samples in labels[:1] if samples):
        for place, name in enumerate(shown["classes"]):
            name = token_name(name)
            label = f"{name} (target)" if place == shown["target"] else name
            rows.append(Row(label, {kind: Cell(shown[kind][place]) for kind in kinds}))
        rest = {kind: Cell(shown["rest"][kind]) for kind in kinds}
        rows.append(Row("all others", rest, ruled=True))
    return [Column(kind, heading, digits=3) for kind, heading in kinds.items()], rows


def _peaks(found: Found) -> tuple[list[Column], list[Row]]:
    parts = ("all", *paper.FREQUENCY_COLUMNS)
    rows = []
    for method, peak in paper.PEAKS.items():
        cells = {}
        for part in parts:
            keys = ("splits", "test", "confidence")
            ours = found.analysed(_ANALYSED, method, *keys, "peak", part)
            cells[part] = _beside(ours, peak)
            cells[f"{part}-mean"] = found.analysed(_ANALYSED, method, *keys, "mean", part)
        rows.append(Row(paper.ROWS[method], cells))
    columns = [Column(part, part, "peak") for part in parts]
    return columns + [Column(f"{part}-mean", part, "mean") for part in parts], rows


def _draw_label(found: Found, stem: Path) -> None:
    from ..report.figures import label_figure
    from ..report.gather import read_runs

    for listing in read_runs(found.paths(_ANALYSED, "labo")[:1]):
        if listing.entry and (figure := label_figure(listing.entry, stem.name)):
            atomic.write_text(stem.with_suffix(".svg"), sheet(figure.panels, figure.legend))


def _draw_histograms(found: Found, stem: Path) -> None:
    from ..report.figures import translation_figures
    from ..report.gather import make_groups, read_runs

    listings = read_runs(found.paths(_ANALYSED, "ls", "labo"))
    for group in make_groups([listing.entry for listing in listings if listing.entry]):
        for figure in translation_figures(group, stem.name):
            if f'id="{stem.name}-chosen' in figure.panels[0]:
                atomic.write_text(stem.with_suffix(".svg"), sheet(figure.panels, figure.legend))


_PANEL, _LEGEND = 360, 30  # the width of a panel, the height of a legend
_VIEW_BOX = re.compile(r'viewBox="0 0 \d+ ([\d.]+)"')


def sheet(panels: Sequence[str], legend: Sequence[tuple[str, str]] = ()) -> str:
    """Panels of a report side by side in one SVG file, which needs no page around it.

    Args:
        panels: ``<svg>`` elements with a ``viewBox``.
        legend: (colour, name) of what is drawn.
    """
    style = (Path(__file__).parents[1] / "report" / "style.css").read_text(encoding="utf-8")
    light = re.sub(r"light-dark\(([^,()]+),[^()]+\)", r"\1", style)
    heights = [float(_VIEW_BOX.findall(panel)[0]) for panel in panels]
    width, height = _PANEL * len(panels), max(heights) + (_LEGEND if legend else 0)
    parts = [
        panel.replace("<svg ", f'<svg x="{place * _PANEL}" y="0" {_sized(_PANEL, tall)} ', 1)
        for place, (panel, tall) in enumerate(zip(panels, heights, strict=True))
    ]
    parts += [
        f'<text class="end {colour}" x="{20 + 120 * place}" y="{height - 8}">{escape(name)}</text>'
        for place, (colour, name) in enumerate(legend)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'{_sized(width, height)} font-family="sans-serif">'
        f"<style>{light}</style>{''.join(parts)}</svg>\n"
    )


def _sized(width: float, height: float) -> str:
    """A size that the style of the page, which lets figures fill their column, does not change."""
    style = f"width: {width}px; height: {height}px; max-width: none"
    return f'width="{width}" height="{height}" style="{style}"'


# ------------------------------------------------------------------ the list

_BLEU = "BLEU is tokenized BLEU, as the paper's; sacreBLEU is in the CSV and JSON files"
_KD = "time of KD: without the training of its teacher, which the paper's seems to include"
_TAU = ("labo.tau=1.15,1.25",)

EXHIBITS: dict[str, Exhibit] = {
    "table1": Exhibit(
        "Table 1: BLEU on bilingual translation, beam 5",
        tuple(paper.BILINGUAL),
        paper.BILINGUAL_COLUMNS,
        _bilingual,
        seeds=5,
        grid=_TAU,
        notes=(_BLEU, "the paper does not say over how many runs its means are"),
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
        notes=(_KD, "KD's alpha and tau are this recipe's; the paper searched 16 pairs"),
    ),
    "table4": Exhibit(
        "Table 4: BLEU by the frequency of the words, German to English",
        ("ls", "labo"),
        (_ANALYSED,),
        _frequency,
        seeds=1,
        grid=_TAU,
        notes=("ours: sacreBLEU on equal thirds; the paper cut slices of 2400 sentences",),
    ),
    "figure1": Exhibit(
        "Figure 1c: the label of one word as three methods give it to the model",
        ("labo",),
        (_ANALYSED,),
        _one_label,
        seeds=1,
        grid=_TAU,
        draw=_draw_label,
    ),
    "figure2": Exhibit(
        "Figure 2: where the probabilities of the tokens chosen by beam search gather",
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


def make_table(exhibit: Exhibit, found: Found, notes: Sequence[str]) -> Table:
    """The exhibit as a table: ours, and in brackets the paper's."""
    columns, rows = exhibit.lay_out(found)
    brackets = (
        "in brackets: the paper's figure"
        if any(cell.paper for row in rows for cell in row.cells.values())
        else "the paper prints no numbers here"
    )
    return Table(exhibit.caption, columns, rows, notes=(brackets, *exhibit.notes, *notes))
