"""The part of the report that is about translation."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from ..analysis.groups import Member, mean_cell, paired_numbers
from ..report.figures import Reliability
from ..report.gather import ReportGroup
from ..report.results import mean_table
from ..report.task import ReportSection
from ..tables import Column, Row, Table
from ..text.report import TokenReport
from ..text.token_text import readable
from .figures import frequency_figure, histogram_figure, length_figure
from .frequency import PARTS
from .records import Translations

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
