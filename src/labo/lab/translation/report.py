"""The part of the report that is about translation: a table, figures, the sentence browser."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..analysis.groups import Member, mean_cell, paired_numbers
from ..report.charts import Axis, Line, line_chart
from ..report.figures import Figure, Panels, Points, Reliability, pairs
from ..report.gather import ReportGroup
from ..report.results import mean_table
from ..report.task import ReportSection
from ..tables import Column, Row, Table
from ..text.report import TokenReport
from ..text.token_text import readable
from .analysis import Translations
from .frequency import PARTS, peak

_SENTENCES = 200  # at most, in the sentence browser


class TranslationReport(TokenReport):
    """Calibration of reference tokens and of the output; a section; the sentence browser."""

    confidence_columns = (
        (Column("ece_own", "ECE own output %", scale=100, better=-1), "decoded", "ece"),
    )
    reliability = (
        *TokenReport.reliability,
        Reliability(
            "own",
            "Reliability on its own output",
            ("decoded",),
            "Filled marks: the tokens of the output; right are those that are aligned with an "
            "equal token of the reference.",
        ),
    )

    def validation(self, task: str) -> Sequence[Column]:
        # A run that is selected by NLL does not decode during training.
        return (
            Column("greedy_bleu", "BLEU, greedy"),
            Column("beam_bleu", "BLEU, beam search"),
            Column("token_accuracy", "token accuracy %", scale=100),
        )

    def section(self, group: ReportGroup, name: str) -> ReportSection | None:
        table = frequency_table(group)
        figures = [
            *frequency_figure(group, f"{name}-frequency"),
            *histogram_figure(group, f"{name}-chosen"),
            *length_figure(group, f"{name}-lengths"),
        ]
        tables = [] if table is None else [table]
        if not tables and not figures:
            return None
        return ReportSection("translation", "Translation", tables, figures)

    def browser(self, group: ReportGroup, budget: int) -> dict[str, Any] | None:
        runs: list[dict[str, str]] = []
        outputs: list[Translations] = []
        for variant in group.shown:
            for member in variant.runs:
                if member.split(group.split):
                    outputs.append(member.records(group.split))
                    runs.append({"name": member.marked_name, "colour": variant.style.colour})
        if not outputs:
            return None
        total = len(outputs[0])
        count = min(total, _SENTENCES)
        while True:
            sentences = [_sentence(outputs, i * total // count) for i in range(count)]
            if count == 1 or len(json.dumps(sentences, ensure_ascii=False)) <= budget:
                return {"runs": runs, "total": total, "split": group.split, "sentences": sentences}
            count //= 2


REPORT = TranslationReport()


def _sentence(outputs: Sequence[Translations], index: int) -> dict[str, Any]:
    first = outputs[0][index]
    shown = []
    for run, records in enumerate(outputs):
        sentence = records[index]
        found = zip(readable(sentence.tokens), sentence.probabilities.tolist(), strict=True)
        tokens = [[text, round(p, 3)] for text, p in found]
        shown.append({"run": run, "text": sentence.hypothesis, "tokens": tokens})
    return {"source": first.source, "reference": first.reference, "outputs": shown}


def frequency_table(group: ReportGroup) -> Table | None:
    """BLEU of each method by word frequency; None without records."""

    def bleu(part: str) -> Callable[[Member], float | None]:
        def value(member: Member) -> float | None:
            parts = member.split(group.split).get("frequency")
            return parts[part]["bleu"] if parts else None

        return value

    columns = {Column(part, f"{part} frequent", better=1): bleu(part) for part in PARTS}
    caption = f"BLEU by word frequency, {group.split} split"
    table = mean_table(caption, group, columns)
    ls, labo = group.first("ls"), group.first("labo")
    if table is None or ls is None or labo is None:
        return table
    differences = {part: paired_numbers(labo, ls, bleu(part)) for part in PARTS}
    cells = {part: mean_cell(found.values()) for part, found in differences.items()}
    return Table(
        caption, table.columns, [*table.rows, Row(f"{labo.label} - {ls.label}", cells, ruled=True)]
    )


# ------------------------------------------------------------------ figures


def frequency_figure(group: ReportGroup, name: str) -> Iterator[Figure]:
    """BLEU by word frequency."""
    panels = Panels(name, group)

    def points(member: Member) -> Points:
        found = member.split(group.split).get("frequency")
        return pairs(range(3), [found[part]["bleu"] for part in PARTS]) if found else ()

    x = Axis("sentences by frequency of their words", names=list(enumerate(PARTS)))
    panels.lines("BLEU by word frequency", x, Axis("BLEU"), points)
    caption = (
        "The sentences are sorted by the mean count of their source tokens in the training data "
        "and cut into three parts (Table 4 of the paper)."
    )
    yield from panels.figure("Frequent and rare words", caption)


def histogram_figure(group: ReportGroup, name: str) -> Iterator[Figure]:
    """The probabilities of the tokens that beam search chose, by word frequency."""
    panels = Panels(name, group)
    for part in PARTS:
        lines, words = [], []
        for variant in group.shown:
            runs = [m for m in variant.runs if "confidence" in m.split(group.split)]
            shares = [m.split(group.split)["confidence"]["shares"].get(part) for m in runs]
            shares = [share for share in shares if share]
            if shares:
                mean = [sum(column) / len(column) for column in zip(*shares, strict=True)]
                lines.append(Line(_steps(mean), variant.style, variant.label, filled=True))
                words.append(f"{variant.label} peaks at {peak(mean):.2f}")
                panels.use(runs)
        if lines:
            panels.charts.append(
                line_chart(
                    panels.next_name(),
                    f"Words: {part} frequent",
                    f"Histogram of the probabilities of chosen tokens: {'; '.join(words)}.",
                    Axis("probability of the chosen token", 0, 1),
                    Axis("share of tokens, %", low=0),
                    lines,
                )
            )
    caption = (
        "The probability of each token that beam search chose, by the word frequency of its "
        "sentence. In Figure 2 of the paper the mode is near 0.9 for label smoothing and near 0.4 "
        "for LABO."
    )
    yield from panels.figure("Probabilities of the chosen tokens", caption, legend=True)


def _steps(shares: Sequence[float]) -> list[tuple[float, float]]:
    """The outline of a histogram over [0, 1], in percent."""
    corners = []
    for i, share in enumerate(shares):
        corners += [(i / len(shares), 100 * share), ((i + 1) / len(shares), 100 * share)]
    return corners


def length_figure(group: ReportGroup, name: str) -> Iterator[Figure]:
    """The length of the output relative to the reference, by beam size."""
    panels = Panels(name, group)

    def ratios(member: Member) -> dict[int, float | None]:
        found = member.split(group.split).get("lengths")
        return {int(beam): of["ratio"] for beam, of in found["beams"].items()} if found else {}

    beams = sorted({beam for member in group.members for beam in ratios(member)})

    def points(member: Member) -> Points:
        found = ratios(member)
        return pairs(range(len(beams)), [found.get(beam) for beam in beams])

    x = Axis("beam size", names=[(i, str(beam)) for i, beam in enumerate(beams)])
    y = Axis("tokens, output / reference")
    panels.lines("Length relative to the reference", x, y, points, level=1)
    caption = (
        "A wider beam finds more probable outputs. If they are shorter, the line falls below 1. "
        "The paper compares methods at beam 5 only."
    )
    yield from panels.figure("Length by beam size", caption)
