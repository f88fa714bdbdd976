"""The first screen of a report: the methods that stand out on each data set, and one figure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from ..analysis.groups import Difference, mean_cell
from ..tables import Cell, Column, Row, Table, best_rows, shown_cell
from .charts import Axis, Chart, ChartRow, dot_chart
from .figures import Figure, views
from .gather import DrawnVariant, ReportGroup, signature_line
from .task import find_report

LEVEL = 0.05  # a difference with a larger p-value is not called one


@dataclass(frozen=True)
class Verdict:
    """The answer for one group."""

    title: str  # the data
    best: Sequence[str]  # the labels of the best methods; several if their numbers are equal
    text: str  # what is said of them
    # (label, sentence) of every other method that differs from a reference, and of LABO
    others: Sequence[tuple[str, str]] = ()
    costs: str = ""  # time and calibration of the best method; empty if nothing is known
    cautions: Sequence[str] = ()  # sentences about what limits the statement


def verdict(group: ReportGroup, confidence: Table | None) -> Verdict:
    """The best method of a group, its differences to the references, its costs, and the others."""
    scored = _scored(group)
    headline = group.kind.headline
    if not scored:
        return Verdict(group.title, (), "No run is finished yet.")
    best = scored[0]
    rows = [Row(v.label, {headline.key: mean_cell(v.scores(group.split).values())}) for v in scored]
    equal = [rows[i].label for i in sorted(best_rows(headline, rows))] or [best.label]
    seeds = len(best.scores(group.split))
    number = shown_cell(headline, rows[0].cells[headline.key]) + _unit(headline)
    name = headline.heading.removesuffix(" %")
    over = f"{group.split} split, {'one seed' if seeds == 1 else f'mean of {seeds} seeds'}"
    if len(scored) == 1:
        text = f"is the only finished method: {name} {number} ({over})."
        return Verdict(group.title, equal, text, costs=_costs(group, best, confidence))
    which = "highest" if headline.better > 0 else "lowest"
    verb = "has" if len(equal) == 1 else "have"
    text = f"{verb} the {which} {name}: {number} ({over})."
    differences = _to_references(group, best)
    return Verdict(
        group.title,
        equal,
        " ".join([text, *_compared(differences, headline)]),
        list(_others(group, scored, headline)),
        _costs(group, best, confidence),
        _cautions(scored, differences),
    )


def _to_references(group: ReportGroup, variant: DrawnVariant) -> list[Difference]:
    """The differences of a method to the references, ls before base."""
    return [
        difference
        for reference in reversed(group.references)
        if (difference := group.difference(variant, reference)) is not None
    ]


def _compared(differences: Sequence[Difference], headline: Column) -> list[str]:
    """Sentences about differences; those of which the same is said are in one."""
    sentences = []
    for judgement, same in groupby(differences, judged):
        numbers = " and ".join(measured(difference, headline) for difference in same)
        sentences.append(f"{numbers[0].upper()}{numbers[1:]}: {judgement}.")
    return sentences


def _others(
    group: ReportGroup, scored: Sequence[DrawnVariant], headline: Column
) -> Iterator[tuple[str, str]]:
    """Each method besides the best that differs from a reference, and LABO, with a sentence.

    A difference between two references is told once, and not again if one of them is the best.
    """
    best, references = scored[0], group.references
    named = (v for v in scored if v.name == "labo")
    ours = min(named, key=lambda v: v.never_active, default=None)  # the best that was active
    for v in scored[1:]:
        told: list[str] = []
        if v in references:
            later = references[references.index(v) :]
            told = [best.label, *(reference.label for reference in later)]
        differences = [d for d in _to_references(group, v) if d.reference not in told]
        if differences and (v is ours or any(map(differs, differences))):
            score = shown_cell(headline, mean_cell(v.scores(group.split).values()))
            number = f"{headline.heading.removesuffix(' %')} {score}{_unit(headline)}"
            order = " and ".join(_order(differences, headline))
            opening = f"is {order}: {number}." if order else f"has {number}."
            yield v.label, " ".join([opening, *_compared(differences, headline)])


def _order(differences: Sequence[Difference], headline: Column) -> Iterator[str]:
    """What a method is worse and better than, as far as the differences show."""
    for word, sign in (("worse", -1), ("better", 1)):
        than = [
            d.reference for d in differences if differs(d) and d.mean * sign * headline.better > 0
        ]
        if than:
            yield f"{word} than {' and '.join(than)}"


def differs(difference: Difference) -> bool:
    """Whether a difference is called one: by seeds if there are several, else by the examples."""
    p = difference.p_bootstrap if difference.p is None else difference.p
    return p is not None and p <= LEVEL


def judged(difference: Difference) -> str:
    """What a difference shows, in words.

    Seeds decide if there are several; if there is one, the bootstrap over examples.
    """
    count = len(difference.seeds)
    if difference.p is None:
        if difference.p_bootstrap is None:
            return "one seed cannot show whether there is a difference"
        if differs(difference):
            return "a difference on these examples, between these two models"
        return "no difference that these examples can show"
    if differs(difference):
        return f"a difference over {count} seeds at the 5 % level"
    return f"no difference that {count} seeds can show"


def measured(difference: Difference, headline: Column) -> str:
    """A difference with its interval and its p-value, in words."""
    unit = " points" if headline.heading.endswith("%") else f" {headline.heading}"
    sign = "+" if difference.mean > 0 else ""
    number = f"{sign}{headline.shown(difference.mean)}"
    about = []
    if difference.interval is not None:
        low, high = map(headline.shown, difference.interval)
        about.append(f"95 % interval {low} to {high}")
    if difference.p is not None:
        about.append(p_text(difference.p))
    if difference.p_bootstrap is not None:
        about.append(f"{p_text(difference.p_bootstrap)} over the examples")
    shown = f" ({', '.join(about)})" if about else ""
    return f"{number}{unit} compared with {difference.reference}{shown}".replace("-", "−")


def p_text(p: float) -> str:
    """A p-value.

    Example:
        >>> p_text(0.25), p_text(0.00099)
        ('p = 0.25', 'p < 0.001')
    """
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def _costs(group: ReportGroup, best: DrawnVariant, confidence: Table | None) -> str:
    sentences = []
    time = mean_cell(group.step_times(best))
    if time.value is not None and best.name != "base":
        factor = shown_cell(Column("time", "time"), time)
        sentences.append(f"A training step takes {factor} times as long as with base.")
    rows = {row.label: row.cells for row in (confidence.rows if confidence else ())}
    if best.label in rows:
        others = [v.label for v in reversed(group.references) if v.label != best.label]
        before, after = (_errors(rows, key, best.label, others) for key in ("ece", "ece_after"))
        if before:
            tempered = f"; after one temperature {after}" if after else ""
            sentences.append(f"Its calibration error (ECE) is {before}{tempered}.")
    return " ".join(sentences)


def _errors(
    rows: Mapping[str, Mapping[str, Cell]], key: str, best: str, others: Sequence[str]
) -> str:
    """The calibration error of the best method, and in parentheses those of the references."""
    values = {label: rows[label][key].value for label in (best, *others) if label in rows}
    shown = {label: f"{100 * value:.1f} %" for label, value in values.items() if value is not None}
    if best not in shown:
        return ""
    beside = ", ".join(f"{label} {shown[label]}" for label in others if label in shown)
    return f"{shown[best]} ({beside})" if beside else shown[best]


def _cautions(scored: Sequence[DrawnVariant], differences: Sequence[Difference]) -> list[str]:
    sentences = []
    smallest = [difference for difference in differences if difference.smallest_p is not None]
    if smallest and max(d.smallest_p or 0 for d in smallest) > LEVEL:
        worst = max(smallest, key=lambda difference: difference.smallest_p or 0)
        sentences.append(
            f"With {len(worst.seeds)} seeds p cannot be below {worst.smallest_p:.2g}; six seeds "
            "are the fewest that can reach 0.05."
        )
    if len(scored) > 2:
        sentences.append(
            f"The best of {len(scored)} methods was picked by the same scores, which favours it, "
            "and p is not corrected for that."
        )
    return sentences


# ------------------------------------------------------------------ the figure


def summary_figure(groups: Sequence[ReportGroup]) -> Figure | None:
    """The scores of all methods; of a single group also differences and calibration errors."""
    shown = [group for group in groups if _scored(group)]
    panels = [
        score_chart(group, f"summary-{i}", titled=len(shown) > 1) for i, group in enumerate(shown)
    ]
    caption = "Small circles are seeds, the larger mark is their mean."
    if len(shown) == 1:
        (group,) = shown
        difference = difference_chart(group, "summary-difference")
        calibration = calibration_chart(group, "summary-calibration")
        panels += [panel for panel in (difference, calibration) if panel is not None]
        if difference is not None:
            caption += " The line of a difference is its 95 % interval over seeds."
        if calibration is not None:
            caption += " Hollow marks: the calibration error after one temperature."
    if not panels:
        return None
    if any(panel.cut for panel in panels):
        caption += " An arrow: far outside of the scale; the number is at the right."
    members = [m for group in shown for v in _scored(group) for m in v.runs]
    return Figure("summary-figure", "All methods", panels, caption, signature_line(members))


def score_chart(group: ReportGroup, name: str, *, titled: bool = False) -> Chart:
    """The score of every method, best first; ``titled`` by the name of the data."""
    headline, scored = group.kind.headline, _scored(group)
    rows = []
    for index, v in enumerate(scored):
        values = [headline.scale * value for value in v.scores(group.split).values()]
        mean = sum(values) / len(values)
        rows.append(
            ChartRow(
                v.label,
                mean,
                v.style,
                f"{mean:.{headline.digits}f}",
                dots=values if len(values) > 1 else (),
                strong=index == 0,
            )
        )
    what = headline.heading
    title = group.title if titled else f"{what[0].upper()}{what[1:]}".removesuffix(" %")
    return dot_chart(name, title, Axis(f"{what}, {group.split} split"), rows)


def difference_chart(group: ReportGroup, name: str, *, titled: bool = False) -> Chart | None:
    """The difference of every method to the last reference, ls if it is there."""
    headline = group.kind.headline
    reference = group.references[-1]
    rows = []
    for v in _scored(group):
        difference = group.difference(v, reference)
        if difference is not None:
            ends = difference.interval and [headline.scale * end for end in difference.interval]
            rows.append(
                ChartRow(
                    v.label,
                    headline.scale * difference.mean,
                    v.style,
                    f"{headline.scale * difference.mean:+.{headline.digits}f}".replace("-", "−"),
                    dots=[headline.scale * value for value in difference.values] if ends else (),
                    interval=(ends[0], ends[1]) if ends else None,
                )
            )
    if not rows:
        return None
    title = f"Difference to {reference.label}"
    title = f"{group.title}: {title[0].lower()}{title[1:]}" if titled else title
    unit = "points" if headline.heading.endswith("%") else headline.heading
    return dot_chart(name, title, Axis(unit), rows, level=0)


def calibration_chart(group: ReportGroup, name: str) -> Chart | None:
    """The calibration error of every method, before and after one temperature."""
    first, second = find_report(group.task).views
    rows = []
    for v in _scored(group):
        ece, after = (
            [100 * view["ece"] for view in views(v, group, way).values()] for way in (first, second)
        )
        if ece:
            mean = sum(ece) / len(ece)
            ring = sum(after) / len(after) if after else None
            text = f"{mean:.1f}" if ring is None else f"{mean:.1f} → {ring:.1f}"
            rows.append(ChartRow(v.label, mean, v.style, text, ring=ring))
    if not rows:
        return None
    return dot_chart(name, "Calibration error", Axis("ECE %", low=0), rows)


# ------------------------------------------------------------------ parts


def _unit(headline: Column) -> str:
    return " %" if headline.heading.endswith(" %") else ""


def _scored(group: ReportGroup) -> list[DrawnVariant]:
    """The variants with a score, best first."""
    sign = group.kind.headline.better
    means = {v.label: mean_cell(v.scores(group.split).values()).value for v in group.shown}
    scored = [v for v in group.shown if means[v.label] is not None]
    return sorted(scored, key=lambda v: -sign * (means[v.label] or 0))
