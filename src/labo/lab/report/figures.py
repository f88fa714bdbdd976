"""The figures that a report has for every task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from ..analysis.groups import Member, Variant, mean_cell
from ..analysis.significance import wilson
from ..run import files as atomic
from ..tables import Column
from .charts import Axis, Chart, ChartRow, Line, bar_chart, dot_chart, line_chart, sheet
from .gather import DrawnVariant, ReportGroup, signature_line
from .palette import Style

# With more or longer names the labels at the ends of lines do not fit: a legend replaces them.
_MOST_LABELS, _LONGEST_LABEL = 6, 14
_FEW = 10  # predictions: a bin with fewer is drawn apart from the line

_SEEDS = "A line is the mean over seeds; the shade is from the lowest to the highest seed."

Numbers = Sequence[float | None]
Points = Iterable[tuple[float, float]]


@dataclass(frozen=True)
class Figure:
    """Charts with one caption."""

    name: str  # its id on the page
    title: str  # what it shows
    panels: Sequence[Chart]  # the charts
    caption: str  # how to read it
    signature: str  # what its numbers are computed from
    # style and label of every method that is drawn, if the panels have no labels
    legend: Sequence[tuple[Style, str]] = ()

    def write(self, stem: Path, suffixes: Sequence[str] = (".pdf", ".svg", ".csv")) -> None:
        """Write it to ``STEM.pdf`` and ``STEM.svg``, and its data to ``STEM.csv``."""
        for suffix, content in sheet(self.panels, self.legend).items():
            if suffix in suffixes:
                atomic.write_bytes(stem.with_name(stem.name + suffix), content)


@dataclass(frozen=True)
class Reliability:
    """A figure of reliability diagrams."""

    name: str  # the end of its id
    title: str  # what it shows
    # one or two views of an analysis; the second is drawn dashed, with hollow marks
    views: Sequence[str]
    caption: str  # what the views are


class Panels:
    """The panels of one figure of a group. A panel without data is left out."""

    def __init__(self, name: str, group: ReportGroup) -> None:
        self.name, self.group = name, group
        self.charts: list[Chart] = []
        self.members: list[Member] = []

    @property
    def labelled(self) -> bool:
        """Whether lines have labels at their ends."""
        longest = max(len(variant.label) for variant in self.group.shown)
        return len(self.group.shown) <= _MOST_LABELS and longest <= _LONGEST_LABEL

    def next_name(self) -> str:
        """The name of the next chart."""
        return f"{self.name}-{len(self.charts) + 1}"

    def use(self, members: Iterable[Member]) -> None:
        """Note the runs that a chart shows, for the signature of the figure."""
        self.members += [member for member in members if member not in self.members]

    def lines(
        self, title: str, x: Axis, y: Axis, points: Callable[[Member], Points], **options: Any
    ) -> None:
        """A chart with a line for every variant with points: the mean over seeds, with a band."""
        lines: list[Line] = []
        used: list[Member] = []
        ends = []
        for variant in self.group.shown:
            seeds = {member: list(points(member)) for member in variant.runs}
            seeds = {member: line for member, line in seeds.items() if line}
            if not seeds:
                continue
            used += seeds
            mean, band = _over_seeds(list(seeds.values()))
            label = variant.label if self.labelled else ""
            lines.append(Line(mean, variant.style, variant.label, label, band=band))
            ends.append(f"{variant.label} ends at {mean[-1][1]:.3g}")
        if lines:
            description = f"{y.label} over {x.label}: {'; '.join(ends)}."
            chart = line_chart(self.next_name(), title, description, x, y, lines, **options)
            self.charts.append(chart)
            self.use(used)

    def figure(self, title: str, caption: str, *, legend: bool | None = None) -> Iterator[Figure]:
        """The figure if it has panels; by default with a legend if lines have no labels."""
        if self.charts:
            shown = [v for v in self.group.shown if set(v.runs) & set(self.members)]
            keys = [(variant.style, variant.label) for variant in shown]
            wanted = not self.labelled if legend is None else legend
            signature = signature_line(self.members)
            yield Figure(self.name, title, self.charts, caption, signature, keys if wanted else ())


def pairs(xs: Numbers, ys: Numbers, scale: float = 1) -> Iterator[tuple[float, float]]:
    """Points of two columns, without those that lack a number."""
    for x, y in zip(xs, ys, strict=True):
        if x is not None and y is not None:
            yield x, y * scale


def _over_seeds(
    lines: Sequence[Sequence[tuple[float, float]]],
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """The mean of several lines; and the smallest and largest value at each point, if several.

    At a point that only some of them have, as of runs that stopped early, it is over these.

    Example:
        >>> _over_seeds([[(1, 0.0), (2, 3.0)], [(1, 1.0), (2, 5.0)]])
        ([(1, 0.5), (2, 4.0)], [(0.0, 1.0), (3.0, 5.0)])
    """
    values: dict[float, list[float]] = {}
    for line in lines:
        for x, y in line:
            values.setdefault(x, []).append(y)
    columns = sorted(values.items())
    mean = [(x, sum(ys) / len(ys)) for x, ys in columns]
    return mean, [(min(ys), max(ys)) for _, ys in columns] if len(lines) > 1 else []


# ------------------------------------------------------------------ over training


def training_figures(group: ReportGroup, name: str, scores: Sequence[Column]) -> list[Figure]:
    """Learning curves, with the first score that is logged; and confidence over training."""
    return [
        *_learning(group, f"{name}-learning", scores),
        *_confidence_over_training(group, f"{name}-confidence-over-training"),
    ]


def _learning(group: ReportGroup, name: str, scores: Sequence[Column]) -> Iterator[Figure]:
    panels = Panels(name, group)
    step = Axis("step", low=0)
    losses = Axis("loss of each method, nats")
    shown: dict[str, Any] = {"settled": True, "starts": _starts(group)}
    panels.lines("Training loss", step, losses, _losses, **shown)
    logged = {metric for member in group.members for metric in member.analysis["training"]["valid"]}
    for score in [score for score in scores if score.key in logged][:1]:
        points = _valid(score.key, score.scale)
        title = score.heading.removesuffix(" %")
        panels.lines(f"Validation: {title}", step, Axis(score.heading), points, **shown)
    nll = Axis("negative log-likelihood, nats")
    panels.lines("Validation: NLL", step, nll, _valid("nll"), **shown)
    caption = (
        f"{_SEEDS} The training losses are different functions and cannot be compared with each "
        "other. The score and the NLL can. The first steps are left out where they are far outside "
        "of the range of the rest."
    )
    if shown["starts"]:
        caption += (
            " A vertical line: the end of a warm-up. There the training loss becomes another "
            "function, and jumps."
        )
    yield from panels.figure("Learning curves", caption)


def _confidence_over_training(group: ReportGroup, name: str) -> Iterator[Figure]:
    panels = Panels(name, group)
    step, starts = Axis("step", low=0), _starts(group)
    confidence = Axis("mean over the validation split")
    panels.lines("Top probability", step, confidence, _valid("confidence"), starts=starts)
    panels.lines("Entropy", step, Axis("mean, nats", low=0), _valid("entropy"), starts=starts)
    panels.lines("Adaptive α", step, Axis("mean of 1 − ρ H(p) / log K"), _alphas, starts=starts)
    caption = (
        "Confidence on the validation split during training. LABO's α is computed from the entropy "
        "of the prediction: the more confident the model, the larger α and the smaller the weight "
        "of the one-hot label. Only LABO's loss uses α; for the other methods the curve is the α "
        "that LABO would use."
    )
    yield from panels.figure("Confidence over training", caption)


def _starts(group: ReportGroup) -> list[tuple[float, str]]:
    """The steps at which methods begin after a warm-up."""
    names: dict[int, dict[str, None]] = {}
    for variant in group.variants:
        if variant.first_step and not variant.never_active:
            names.setdefault(variant.first_step, {})[variant.name] = None
    return [
        (step, f"{', '.join(of_step)} begin{'s' if len(of_step) == 1 else ''}")
        for step, of_step in sorted(names.items())
    ]


def _losses(member: Member) -> Points:
    curve = member.analysis["training"]["loss"]
    return pairs(curve["step"], curve["loss"])


def _valid(metric: str, scale: float = 1) -> Callable[[Member], Points]:
    def points(member: Member) -> Points:
        curve = member.analysis["training"]["valid"]
        return pairs(curve["step"], curve[metric], scale) if metric in curve else ()

    return points


def _alphas(member: Member) -> Points:
    training = member.analysis["training"]
    return pairs(training["valid"]["step"], training["alpha"]) if training["alpha"] else ()


# ------------------------------------------------------------------ confidence


def views(variant: Variant, group: ReportGroup, name: str) -> dict[Member, Mapping[str, Any]]:
    """The VIEW of each run of a method that has it."""
    each = {member: member.view(group.split, name) for member in variant.runs}
    return {member: view for member, view in each.items() if view}


def confidence_figures(
    group: ReportGroup, name: str, reliability: Sequence[Reliability], way: str
) -> list[Figure]:
    """Reliability diagrams; and confidence on errors and risk over coverage of the view ``way``."""
    diagrams = (_reliability(group, f"{name}-{spec.name}", spec) for spec in reliability)
    return [*chain.from_iterable(diagrams), *_errors(group, f"{name}-errors", way)]


def _reliability(group: ReportGroup, name: str, spec: Reliability) -> Iterator[Figure]:
    panels = Panels(name, group)
    for variant in group.shown:
        lines: list[Line] = []
        words = []
        for index, way in enumerate(spec.views):
            if seeds := views(variant, group, way):
                bins = _pooled([view["reliability"] for view in seeds.values()])
                lines += _diagram(bins, variant, after=index == 1)
                words.append(f"{way}, ECE {_mean(view['ece'] for view in seeds.values()):.3f}")
                panels.use(seeds)
        if lines:
            panels.charts.append(
                line_chart(
                    panels.next_name(),
                    variant.label,
                    f"Accuracy over confidence of {variant.label}: {'; '.join(words)}.",
                    Axis("confidence", 0, 1),
                    Axis("accuracy", 0, 1),
                    lines,
                    diagonal=True,
                )
            )
    caption = (
        f"A calibrated model is on the dotted line. Above it the model is underconfident: its "
        f"accuracy is higher than its confidence. {spec.caption} The area of a mark is its share "
        "of the predictions. The seeds of a method are pooled. The shade is the 95 % Wilson "
        f"interval for the predictions of one run. A bin with fewer than {_FEW} of them is not "
        "joined to the line."
    )
    yield from panels.figure(spec.title, caption, legend=False)


@dataclass(frozen=True)
class _Bin:
    """A bin of several runs: means, predictions per run, and the share of all predictions."""

    confidence: float
    accuracy: float
    count: float
    share: float


def _pooled(diagrams: Sequence[Mapping[str, Any]]) -> list[_Bin]:
    """The bins of several runs as one diagram, without the empty ones."""
    size = sum(sum(diagram["count"]) for diagram in diagrams)
    bins = []
    for i in range(len(diagrams[0]["count"])):
        filled = [d for d in diagrams if d["count"][i]]
        total = sum(d["count"][i] for d in filled)
        if total:
            confidence, accuracy = (
                sum(d["count"][i] * d[key][i] for d in filled) / total
                for key in ("confidence", "accuracy")
            )
            bins.append(_Bin(confidence, accuracy, total / len(diagrams), total / size))
    return bins


def _diagram(bins: Sequence[_Bin], variant: DrawnVariant, *, after: bool) -> Iterator[Line]:
    """A line through neighbouring bins with enough predictions; the other bins one by one."""
    for few, neighbours in groupby(bins, lambda each: each.count < _FEW):
        together = list(neighbours)
        for part in [[each] for each in together] if few else [together]:
            yield Line(
                [(each.confidence, each.accuracy) for each in part],
                variant.style,
                variant.label,
                after=after,
                marks=[each.share for each in part],
                # The second line is read against the diagonal; its band would cover the first.
                band=[] if after else [wilson(each.accuracy, each.count) for each in part],
            )


def _errors(group: ReportGroup, name: str, way: str) -> Iterator[Figure]:
    panels = Panels(name, group)
    rows = []
    for variant in group.shown:
        seeds = views(variant, group, way)
        wrong = _mean(view["confidence_on_errors"] for view in seeds.values())
        right = _mean(view["confidence_on_right"] for view in seeds.values())
        if wrong is not None and right is not None:
            text = f"{wrong:.2f}, {right:.2f}"
            rows.append(ChartRow(variant.label, right, variant.style, text, ring=wrong))
            panels.use(seeds)
    if rows:
        title = "Confidence on wrong and on right predictions"
        x = Axis("mean top probability", 0, 1)
        panels.charts.append(dot_chart(panels.next_name(), title, x, rows))

    def curve(member: Member) -> Points:
        view = member.view(group.split, way)
        risk = view["selective"]["curve"] if view else {"coverage": [], "risk": []}
        return pairs(risk["coverage"], risk["risk"], 100)

    panels.lines(
        "Risk and coverage",
        Axis("share of predictions, most confident first", 0, 1),
        Axis("errors among them, %", low=0),
        curve,
    )
    caption = (
        "Hollow marks: wrong predictions. Filled marks: right predictions. The further apart they "
        "are, the better confidence separates them. Risk is the share of errors among the most "
        f"confident predictions; lower is better. {_SEEDS}"
    )
    yield from panels.figure("Confidence and errors", caption)


def _mean(values: Iterable[float | None]) -> float | None:
    return mean_cell(value for value in values if value is not None).value


# ------------------------------------------------------------------ one label


def label_figure(
    member: Member, name: str, class_names: Callable[[Sequence[str]], list[str]]
) -> Figure | None:
    """Figure 1c of the paper: three labels of one sample; None without ``examples.json``."""
    samples = member.analysis["labels"]
    if not samples:
        return None
    shown = samples[0]
    names = class_names(shown["classes"])
    kinds = {
        "one_hot": ("One-hot", Style("m0")),
        "ls": ("Label smoothing", Style("m1")),
        "labo": ("LABO", Style("m2")),
    }
    panels = []
    for number, (kind, (title, style)) in enumerate(kinds.items(), 1):
        rows = [
            ChartRow(text, value, style, f"{value:.3f}", strong=i == shown["target"])
            for i, (text, value) in enumerate(zip(names, shown[kind], strict=True))
        ]
        panels.append(bar_chart(f"{name}-{number}", title, rows))
    alpha = "adaptive" if shown["rho"] is not None else "fixed"
    caption = (
        f"The label of one sample of class “{names[shown['target']]}” ({shown['title']}) in three "
        f"methods, over the {len(names)} classes that are most probable for the model "
        f"{member.marked_name}. Label smoothing (α = {shown['alpha_ls']:g}) gives all other "
        f"classes the same mass. LABO (τ = {shown['tau']:g}, {alpha} α = {shown['alpha']:.3f}) "
        "gives more mass to the classes that the model finds probable (Figure 1c of the paper)."
    )
    return Figure(name, "Three labels of one sample", panels, caption, signature_line([member]))


def labelled_member(variants: Iterable[DrawnVariant]) -> Member | None:
    """A run with samples to draw labels of; one of LABO if there is one."""
    ours_first = sorted(variants, key=lambda variant: variant.name != "labo")
    members = (member for variant in ours_first for member in variant.runs)
    return next((member for member in members if member.analysis["labels"]), None)
