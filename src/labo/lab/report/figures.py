"""The figures of a report: which numbers of the analysis are drawn, and what one sees in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..translation.frequency import PARTS
from .charts import Axis, Line, Row, bar_chart, dot_chart, line_chart
from .embed import token_name
from .gather import TRANSLATION, Entry, Group, Variant, signature_line

# With more or longer names, labels at the ends of lines do not fit, and a legend stands above.
_MOST_LABELS, _LONGEST_LABEL = 8, 14
_LONGEST_ROW = 24

Numbers = Sequence[float | None]


@dataclass(frozen=True)
class Figure:
    """Panels with one caption.

    Attributes:
        title: what it shows.
        panels: SVG elements.
        caption: what one sees.
        signature: what its numbers rest on.
        legend: (classes of the key, name) of what is drawn, where the panels do not say it.
    """

    title: str
    panels: Sequence[str]
    caption: str
    signature: str
    legend: Sequence[tuple[str, str]] = ()


class _Panels:
    """The panels of one figure of a group; a panel without data is left out."""

    def __init__(self, name: str, group: Group) -> None:
        self.name, self.group = name, group
        self.drawn: list[str] = []
        self.entries: list[Entry] = []

    @property
    def labelled(self) -> bool:
        longest = max(len(variant.label) for variant in self.group.variants)
        return len(self.group.variants) <= _MOST_LABELS and longest <= _LONGEST_LABEL

    def next_name(self) -> str:
        return f"{self.name}-{len(self.drawn) + 1}"

    def use(self, entries: Iterable[Entry]) -> None:
        self.entries += [entry for entry in entries if entry not in self.entries]

    def lines(
        self,
        title: str,
        x: Axis,
        y: Axis,
        points: Callable[[Entry], Iterable[tuple[float, float]]],
        **options: Any,
    ) -> None:
        """A line for every run that has at least one point."""
        lines: list[Line] = []
        used: list[Entry] = []
        ends = []
        for variant in self.group.variants:
            found = [(entry, list(points(entry))) for entry in variant.entries]
            found = [(entry, line) for entry, line in found if line]
            used += [entry for entry, _ in found]
            for place, (_, line) in enumerate(found):
                label = variant.label if self.labelled and place == 0 else ""
                lines.append(Line(line, variant.colour, label, variant.dashed))
            if found:
                last = ", ".join(f"{line[-1][1]:.3g}" for _, line in found)
                ends.append(f"{variant.label} ends at {last}")
        if lines:
            description = f"{y.label} over {x.label}: {'; '.join(ends)}."
            chart = line_chart(self.next_name(), title, description, x, y, lines, **options)
            self.drawn.append(chart)
            self.use(used)

    def figure(self, title: str, caption: str, *, legend: bool | None = None) -> Iterator[Figure]:
        """The figure, with a legend if it is wanted or, unless told, if no line has its label."""
        if self.drawn:
            shown = [v for v in self.group.variants if set(v.entries) & set(self.entries)]
            keys = [(variant.key, variant.label) for variant in shown]
            wanted = not self.labelled if legend is None else legend
            signature = signature_line(self.entries)
            yield Figure(title, self.drawn, caption, signature, keys if wanted else ())


# ------------------------------------------------------------------ over training


def training_figures(group: Group, name: str) -> list[Figure]:
    """Learning curves; and what happens to confidence, entropy and alpha."""
    return [*_learning(group, f"{name}-learning"), *_hesitation(group, f"{name}-hesitation")]


def _learning(group: Group, name: str) -> Iterator[Figure]:
    panels = _Panels(name, group)
    step = Axis("step")
    panels.lines("Training loss", step, Axis("each method's own loss, nats"), _training("loss"))
    metric, label, scale = _score(group)
    title = f"Validation: {label.partition(',')[0]}"
    panels.lines(title, step, Axis(label), _valid(metric, scale))
    panels.lines("Validation: NLL", step, Axis("negative log-likelihood, nats"), _valid("nll"))
    caption = (
        "Every run is a line; runs of one method share a colour. The training losses are different "
        "objectives and cannot be compared with each other; score and NLL can."
    )
    yield from panels.figure("Learning curves", caption)


def _score(group: Group) -> tuple[str, str, float]:
    """The score that is known during training: its name, label and scale."""
    if group.task != TRANSLATION:
        return "accuracy", "accuracy, %", 100
    if any("bleu" in entry.analysis["training"]["valid"] for entry in group.entries):
        return "bleu", "BLEU", 1
    return "token_accuracy", "token accuracy, %", 100


def _hesitation(group: Group, name: str) -> Iterator[Figure]:
    panels = _Panels(name, group)
    step = Axis("step")
    panels.lines(
        "Top probability", step, Axis("mean over the validation set"), _valid("confidence")
    )
    panels.lines("Entropy", step, Axis("mean, nats", low=0), _valid("entropy"))
    panels.lines("Adaptive α", step, Axis("mean of 1 − ρ H(p) / log K"), _alphas)
    caption = (
        "How sure the models are while they learn. α comes from the entropy of the prediction: the "
        "surer the model, the less weight LABO leaves to the label itself. Only LABO's loss uses "
        "it; for the other methods it is what LABO would use."
    )
    yield from panels.figure("Confidence over training", caption)


def _pairs(xs: Numbers, ys: Numbers, scale: float = 1) -> Iterator[tuple[float, float]]:
    for x, y in zip(xs, ys, strict=True):
        if x is not None and y is not None:
            yield x, y * scale


def _training(key: str) -> Callable[[Entry], Iterable[tuple[float, float]]]:
    def points(entry: Entry) -> Iterable[tuple[float, float]]:
        curve = entry.analysis["training"]["loss"]
        return _pairs(curve["step"], curve[key])

    return points


def _valid(metric: str, scale: float = 1) -> Callable[[Entry], Iterable[tuple[float, float]]]:
    def points(entry: Entry) -> Iterable[tuple[float, float]]:
        curve = entry.analysis["training"]["valid"]
        return _pairs(curve["step"], curve[metric], scale) if metric in curve else ()

    return points


def _alphas(entry: Entry) -> Iterable[tuple[float, float]]:
    training = entry.analysis["training"]
    if training["alpha"] is None:
        return ()
    return _pairs(training["valid"]["step"], training["alpha"]["values"])


# ------------------------------------------------------------------ confidence


def views(group: Group) -> tuple[str, str]:
    """The predictions of a group without and with a temperature, see ``labo.lab.analysis.run``."""
    return ("forced", "forced_after") if group.task == TRANSLATION else ("before", "after")


def view(entry: Entry, group: Group, name: str) -> Mapping[str, Any] | None:
    """How the predictions of a run look, if it has records."""
    split = entry.split(group.split)
    found: Mapping[str, Any] | None = split["views"].get(name) if split else None
    return found


def confidence_figures(group: Group, name: str) -> list[Figure]:
    """Reliability diagrams; confidence where right and wrong; what abstaining would buy."""
    rings = "Rings: after one temperature, fitted on the validation split."
    if group.task == TRANSLATION:
        ways = f"Full dots: every reference token, given the true words before it. {rings}"
        own = "Full dots: the tokens of the translation itself, right where the reference has them."
        diagrams = [
            *_reliability(group, f"{name}-reliability", "Reliability", views(group), ways),
            *_reliability(group, f"{name}-own", "Reliability on its own output", ("decoded",), own),
        ]
    else:
        ways = f"Full dots: as the model says. {rings}"
        diagrams = [*_reliability(group, f"{name}-reliability", "Reliability", views(group), ways)]
    return [*diagrams, *_errors(group, f"{name}-errors")]


def _reliability(
    group: Group, name: str, title: str, shown_ways: Sequence[str], ways: str
) -> Iterator[Figure]:
    """Accuracy against confidence; the second way, if there is one, dashed and with rings."""
    panels = _Panels(name, group)
    for variant in group.variants:
        lines, words = [], []
        for place, way in enumerate(shown_ways):
            found = [(entry, view(entry, group, way)) for entry in variant.entries]
            diagrams = [shown["reliability"] for _, shown in found if shown]
            points, shares = _pooled(diagrams)
            if points:
                lines.append(Line(points, variant.colour, dashed=place == 1, marks=shares))
                ece = [shown["ece"] for _, shown in found if shown]
                words.append(f"{way}, ECE {sum(ece) / len(ece):.3f}")
                panels.use(entry for entry, shown in found if shown)
        if lines:
            panels.drawn.append(
                line_chart(
                    panels.next_name(),
                    variant.label,
                    f"Accuracy against confidence of {variant.label}: {'; '.join(words)}.",
                    Axis("confidence", 0, 1),
                    Axis("accuracy", 0, 1),
                    lines,
                    diagonal=True,
                )
            )
    caption = (
        f"On the dotted line a model is right as often as it claims; above it, it knows more than "
        f"it claims. {ways} A dot's area is its share of the predictions; the seeds of a method "
        "are pooled."
    )
    yield from panels.figure(title, caption, legend=False)


def _pooled(diagrams: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[float, float]], list[float]]:
    """Several runs' bins as one diagram: (confidence, accuracy) of each, and its share."""
    points, counts = [], []
    for i in range(len(diagrams[0]["count"]) if diagrams else 0):
        filled = [d for d in diagrams if d["count"][i]]
        total = sum(d["count"][i] for d in filled)
        if total:
            confidence, accuracy = (
                sum(d["count"][i] * d[key][i] for d in filled) / total
                for key in ("confidence", "accuracy")
            )
            points.append((confidence, accuracy))
            counts.append(total)
    return points, [count / sum(counts) for count in counts]


def _errors(group: Group, name: str) -> Iterator[Figure]:
    panels = _Panels(name, group)
    way = views(group)[0]
    rows = []
    for variant in group.variants:
        found = [shown for entry in variant.entries if (shown := view(entry, group, way))]
        wrong = _mean(shown["confidence_on_errors"] for shown in found)
        right = _mean(shown["confidence_on_right"] for shown in found)
        if wrong is not None and right is not None:
            rows.append(Row(_cut(variant.label), (wrong, right), variant.colour))
            panels.use(entry for entry in variant.entries if view(entry, group, way))
    if rows:
        words = [f"{row.label} {row.values[0]:.2f} and {row.values[1]:.2f}" for row in rows]
        panels.drawn.append(
            dot_chart(
                panels.next_name(),
                "Confidence on errors and on right answers",
                f"Mean top probability where wrong and where right: {'; '.join(words)}.",
                "mean top probability",
                rows,
            )
        )

    def curve(entry: Entry) -> Iterable[tuple[float, float]]:
        shown = view(entry, group, way)
        found = shown["selective"]["curve"] if shown else {"coverage": [], "risk": []}
        return _pairs(found["coverage"], [None if r is None else 100 * r for r in found["risk"]])

    panels.lines(
        "Risk and coverage",
        Axis("share answered, surest first", 0, 1),
        Axis("errors among them, %", low=0),
        curve,
    )
    caption = (
        "Rings are wrong answers, full dots right ones: the further apart, the better confidence "
        "tells them from each other. Risk is the share of errors that remains if only the surest "
        "part is answered: lower is better."
    )
    yield from panels.figure("Does confidence know the errors?", caption)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


# ------------------------------------------------------------------ translation


def translation_figures(group: Group, name: str) -> list[Figure]:
    """BLEU by word frequency, probabilities of the chosen tokens, lengths by beam size."""
    return [
        *_frequency(group, f"{name}-frequency"),
        *_histograms(group, f"{name}-chosen"),
        *_lengths(group, f"{name}-lengths"),
    ]


def _section(entry: Entry, group: Group, key: str) -> Mapping[str, Any] | None:
    split = entry.split(group.split)
    found: Mapping[str, Any] | None = split.get(key) if split else None
    return found


def _frequency(group: Group, name: str) -> Iterator[Figure]:
    panels = _Panels(name, group)

    def points(entry: Entry) -> Iterable[tuple[float, float]]:
        found = _section(entry, group, "frequency")
        return _pairs(range(3), [found[part]["bleu"] for part in PARTS]) if found else ()

    x = Axis("sentences by frequency of their words", names=list(enumerate(PARTS)))
    panels.lines("BLEU by word frequency", x, Axis("BLEU"), points)
    caption = (
        "The sentences are ordered by the mean count of their source tokens in the training data "
        "and cut into three parts (the paper's Table 4)."
    )
    yield from panels.figure("Frequent and rare words", caption)


def _histograms(group: Group, name: str) -> Iterator[Figure]:
    panels = _Panels(name, group)
    for part in PARTS:
        lines, words = [], []
        for variant in group.variants:
            found = [(entry, _section(entry, group, "confidence")) for entry in variant.entries]
            shares = [shown["shares"].get(part) for _, shown in found if shown]
            shares = [share for share in shares if share]
            if shares:
                mean = [sum(column) / len(column) for column in zip(*shares, strict=True)]
                lines.append(Line(_steps(mean), variant.colour, dashed=variant.dashed, filled=True))
                peak = (mean.index(max(mean)) + 0.5) / len(mean)
                words.append(f"{variant.label} peaks at {peak:.2f}")
                panels.use(entry for entry, shown in found if shown)
        if lines:
            panels.drawn.append(
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
        "The probability of each token that beam search chose, by the frequency of the words of "
        "its sentence. In the paper's Figure 2 label smoothing gathers near 0.9 and LABO near 0.4."
    )
    yield from panels.figure("Probabilities of the chosen tokens", caption, legend=True)


def _steps(shares: Sequence[float]) -> list[tuple[float, float]]:
    """The outline of a histogram over [0, 1], in percent."""
    corners = []
    for i, share in enumerate(shares):
        corners += [(i / len(shares), 100 * share), ((i + 1) / len(shares), 100 * share)]
    return corners


def _lengths(group: Group, name: str) -> Iterator[Figure]:
    panels = _Panels(name, group)

    def ratios(entry: Entry) -> dict[int, float | None]:
        found = _section(entry, group, "lengths")
        return {int(beam): of["ratio"] for beam, of in found["beams"].items()} if found else {}

    beams = sorted({beam for entry in group.entries for beam in ratios(entry)})

    def points(entry: Entry) -> Iterable[tuple[float, float]]:
        found = ratios(entry)
        return _pairs(range(len(beams)), [found.get(beam) for beam in beams])

    x = Axis("beam size", names=[(i, str(beam)) for i, beam in enumerate(beams)])
    y = Axis("tokens, output / reference")
    panels.lines("Length against the reference", x, y, points, level=1)
    caption = (
        "A wider beam finds likelier outputs; if those are shorter, the line falls below 1. The "
        "paper compares at beam 5 only."
    )
    yield from panels.figure("Length by beam size", caption)


# ------------------------------------------------------------------ one label


def label_figure(entry: Entry, name: str) -> Figure | None:
    """Figure 1c of the paper: three labels of one sample; None without ``examples.json``."""
    if not entry.analysis["labels"]:
        return None
    shown = entry.analysis["labels"][0]
    is_translation = entry.run.task == TRANSLATION
    names = [token_name(c) if is_translation else c for c in shown["classes"]]
    kinds = {"one_hot": ("One-hot", "m0"), "ls": ("Label smoothing", "m1"), "labo": ("LABO", "m2")}
    panels = []
    for place, (kind, (title, colour)) in enumerate(kinds.items(), 1):
        rows = [
            Row(_cut(text), [value], colour, strong=i == shown["target"])
            for i, (text, value) in enumerate(zip(names, shown[kind], strict=True))
        ]
        words = ", ".join(f"{row.label} {row.values[0]:.3f}" for row in rows)
        panels.append(bar_chart(f"{name}-{place}", title, f"{title} label: {words}.", rows))
    own = names[shown["target"]]
    alpha = "adaptive" if shown["rho"] is not None else "fixed"
    caption = (
        f"The label “{own}” of one sample ({shown['title']}) as three methods give it to the "
        f"model; the {len(names)} likeliest classes of the model {entry.run.name}. Label smoothing "
        f"(α = {shown['alpha_ls']:g}) treats all other classes alike; LABO (τ = {shown['tau']:g}, "
        f"{alpha} α = {shown['alpha']:.3f}) gives more to those the model finds likely (the "
        "paper's Figure 1c)."
    )
    return Figure("Three labels for one sample", panels, caption, signature_line([entry]))


def _cut(label: str) -> str:
    return label if len(label) <= _LONGEST_ROW else label[: _LONGEST_ROW - 1] + "…"


def first_labo(variants: Iterable[Variant]) -> Entry | None:
    """A run with samples to draw labels of, LABO's if there is one."""
    entries = [(v.name != "labo", e) for v in variants for e in v.entries if e.analysis["labels"]]
    return min(entries, key=lambda pair: pair[0])[1] if entries else None
