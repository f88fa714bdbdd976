"""Figures about translation: word frequency, probabilities of chosen tokens, output lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..analysis.groups import Member
from ..report.charts import Axis, Line, line_chart
from ..report.figures import Figure, Panels, Points, pairs
from ..report.gather import ReportGroup
from .frequency import PARTS, peak


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
