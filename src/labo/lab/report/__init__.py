"""``labo report``: runs -> one HTML page that needs no network.

``gather`` reads the runs and sorts them into groups. ``summary`` makes the first screen,
``results`` and ``figures`` the tables and figures that every task has, ``task`` finds what a task
adds. ``charts`` draws with matplotlib, in the style of ``charts.mplstyle``; ``palette`` says how a
method looks, and ``page.html.j2`` is the page.

Torch is needed only for runs that were not analyzed yet.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
from markupsafe import Markup

from ... import __version__
from ..analysis.labels import DIGITS, STEP, STRENGTHS, TAUS
from ..analysis.reading import read_examples
from ..errors import RequestError
from ..run import files as atomic
from ..tables import NOTHING, Cell, Column, best_rows, shown_cell
from . import figures, palette, results, summary
from .charts import swatch
from .gather import Listing, ReportGroup, make_groups, method_text, read_runs
from .task import find_report

_HERE = Path(__file__).parent
_SCRIPTS = ("page.js", "explorer.js", "sentences.js")
_SAMPLES = 60  # at most, in the explorer
_SENTENCES_BUDGET = 1_500_000  # characters of all sentence browsers together

__all__ = ["write_report"]


def write_report(
    paths: Iterable[str | Path],
    out: str | Path,
    left_out: Mapping[Path, str] = MappingProxyType({}),
    figures: str | Path | None = None,
) -> list[Listing]:
    """Write a page about runs.

    Args:
        paths: run directories. One that is broken or unfinished is listed as such.
        out: the HTML file.
        left_out: further runs that were asked for, and why they are not shown.
        figures: a folder for the figures: each as PDF, as SVG, and its data as CSV.

    Returns:
        The runs with their states.

    Raises:
        RequestError: no run can be reported.
    """
    listings = read_runs(dict.fromkeys(Path(path) for path in paths))
    members = [listing.member for listing in listings if listing.member]
    if not members:
        reasons = "; ".join(str(listing.state.reason) for listing in listings)
        raise RequestError(f"nothing to report: {reasons}")
    out = Path(out)
    if not out.parent.is_dir():
        raise RequestError(f"there is no folder {out.parent} to write {out.name} to")
    atomic.refuse_foreign(out, b'<meta name="generator" content="labo ')
    if figures is not None and Path(figures).exists() and not Path(figures).is_dir():
        raise RequestError(f"--figures {figures}: it is a file, not a folder")
    content = _content(listings, make_groups(members), left_out)
    # A lone surrogate from the JSON of a record cannot be encoded as UTF-8.
    atomic.write_text(out, _render(content).encode("utf-8", "replace").decode())
    if figures is not None:
        Path(figures).mkdir(parents=True, exist_ok=True)
        for name, figure in _named_figures(content):
            figure.write(Path(figures) / name)
    return listings


def _render(content: Mapping[str, Any]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "embedded": _embedded,
        "shown": _shown,
        "swatch": lambda style: Markup(swatch(style)),
        "unbroken": _unbroken,
    }
    scripts = [_read(name) for name in _SCRIPTS]
    return environment.get_template("page.html.j2").render(
        version=__version__,
        nothing=Cell(),
        best_rows=best_rows,
        style=Markup(palette.variables() + _read("style.css")),
        scripts=[Markup(script) for script in scripts],
        script_hashes=" ".join(f"'sha256-{_digest(script)}'" for script in scripts),
        method_text=method_text,
        **content,
    )


def _content(
    listings: Sequence[Listing], groups: Sequence[ReportGroup], left_out: Mapping[Path, str]
) -> dict[str, Any]:
    """What the page shows."""
    contexts = [_group_context(group, f"g{index}") for index, group in enumerate(groups)]
    return {
        "listings": listings,
        "groups": contexts,
        "summary": summary.summary_figure(groups),
        "cautions": [
            *_missing(listings, left_out),
            *dict.fromkeys(c for context in contexts for c in context["verdict"].cautions),
        ],
        "sections": _sections(contexts),
        "browsers": _browsers(groups),
        "label": _label(groups),
        "explorer": explorer_data(groups),
        "left_out": _left_out(listings, groups, left_out),
    }


def _named_figures(content: Mapping[str, Any]) -> Iterator[tuple[str, figures.Figure]]:
    """The figures of a page with the names of their files, such as ``cldr-de-en-learning``."""
    for figure in (content["summary"], content["label"]):
        if figure is not None:
            yield figure.name, figure
    groups = content["groups"]
    for number, group in enumerate(groups):
        section = group["section"]
        of_task = section.figures if section is not None else ()
        title = re.sub(r"\W+", "-", group["title"]).strip("-").lower()
        prefix = f"{title}-" if len(groups) > 1 else ""
        for figure in (*group["training"], *group["confidence"], *of_task):
            yield prefix + figure.name.removeprefix(f"g{number}-"), figure


def _group_context(group: ReportGroup, name: str) -> dict[str, Any]:
    """What the template shows of a group; empty where there is no data."""
    task = find_report(group.task)
    confidence = results.confidence_table(group, task.views, task.confidence_columns)
    return {
        "title": group.title,
        "split": group.split,
        "verdict": summary.verdict(group, confidence),
        "styles": {variant.label: variant.style for variant in group.shown},
        "notes": group.notes,
        "results": results.results_table(group),
        "bootstrapped": any(d.p_bootstrap is not None for d in group.differences),
        "training": figures.training_figures(group, name, task.validation(group.task)),
        "confidence_table": confidence,
        "confidence_text": results.confidence_text(group, confidence),
        "confidence": figures.confidence_figures(group, name, task.reliability, task.views[0]),
        "section": task.section(group, name),
    }


def _sections(contexts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The sections that tasks add, each with its groups."""
    sections: dict[str, dict[str, Any]] = {}
    for context in contexts:
        if section := context["section"]:
            entry = {"name": section.name, "title": section.title, "groups": []}
            sections.setdefault(section.name, entry)["groups"].append(context)
    return list(sections.values())


def _browsers(groups: Sequence[ReportGroup]) -> dict[str, dict[str, Any]]:
    """Group title -> what its sentence browser shows, for the groups that have one."""
    budget = _SENTENCES_BUDGET // len(groups)
    browsers = {group.title: find_report(group.task).browser(group, budget) for group in groups}
    return {title: content for title, content in browsers.items() if content is not None}


def _label(groups: Sequence[ReportGroup]) -> figures.Figure | None:
    """The figure of one label, of a run of LABO if there is one."""
    member = figures.labelled_member(v for group in groups for v in group.shown)
    if member is None:
        return None
    return figures.label_figure(member, "label", find_report(member.run.task).class_names)


def explorer_data(groups: Sequence[ReportGroup]) -> dict[str, Any] | None:
    """The samples of one seed of each method with examples, those of LABO first; None without."""
    samples: list[dict[str, Any]] = []
    stationary: dict[str, Any] = {}
    variants = [(group, variant) for group in groups for variant in group.shown]
    for group, variant in sorted(variants, key=lambda pair: pair[1].name != "labo"):
        member = variant.runs[0]
        content = read_examples(member.run) or {"examples": []}
        class_names = find_report(group.task).class_names
        stationary |= member.analysis["stationary"]
        for label, example in zip(member.analysis["labels"], content["examples"], strict=True):
            if not math.isfinite(example["logits"][example["target"]]):
                continue  # a masked target has no label
            image = example.get("image")
            is_image = isinstance(image, str) and image.startswith("data:image/")
            samples.append(
                {
                    "title": label["title"],
                    "run": member.marked_name,
                    "context": label["context"],
                    "image": image if is_image else None,
                    "names": class_names(label["classes"]),
                    "target": label["target"],
                    "onehot": label["one_hot"],
                    "p": [round(mass, DIGITS) for mass in label["prediction"]],
                    **label["sliders"],
                }
            )
    if not samples:
        return None
    samples = samples[:_SAMPLES]
    needed = {str(sample["classes"]) for sample in samples}
    return {
        "examples": samples,
        "taus": TAUS,
        "strengths": STRENGTHS,
        "step": STEP,
        "stationary": {count: table for count, table in stationary.items() if count in needed},
    }


def _missing(listings: Sequence[Listing], left_out: Mapping[Path, str]) -> list[str]:
    """How many of the runs that were asked for the statement does not rest on."""
    missing = len(left_out) + sum(listing.state.kind != "finished" for listing in listings)
    if not missing:
        return []
    asked = len(left_out) + len(listings)
    return [f"{missing} of {asked} runs are missing from this page: see Left out and Runs."]


def _left_out(
    listings: Sequence[Listing], groups: Sequence[ReportGroup], left_out: Mapping[Path, str]
) -> list[str]:
    """What the page lacks, and how to get it."""
    reasons: dict[str, list[str]] = {}
    for path, reason in left_out.items():
        reasons.setdefault(reason, []).append(path.name)
    for listing in listings:
        member = listing.member
        if member is None:
            reasons.setdefault(str(listing.state), []).append(listing.name)
            continue
        notes = list(member.analysis["notes"])
        if listing.state.kind == "unfinished":
            notes.append("no results yet")
        if not member.analysis["labels"]:
            notes.append("no samples to draw labels of")
        for note in notes:
            reasons.setdefault(note, []).append(listing.name)
    for group in groups:
        curves = [member.analysis["training"]["valid"] for member in group.members]
        if not any("entropy" in curve for curve in curves):
            note = "no confidence over training: entropy was not logged"
            reasons.setdefault(note, []).append(group.title)
    return [f"{', '.join(dict.fromkeys(names))}: {note}" for note, names in reasons.items()]


# ------------------------------------------------------------------ for the template


def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _embedded(value: Any) -> Markup:
    """JSON in a script element. Nothing in it can end the element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _unbroken(text: str) -> str:
    """A sentence whose lines do not break between a number and its unit."""
    return re.sub(r"(?<=\d) (?=%|points|BLEU)|(?<=p) (?=[=<])|(?<=[=<]) (?=\d)", "\u00a0", text)


def _shown(cell: Cell, column: Column, signed: bool) -> str:
    if cell.value is None:
        return NOTHING
    text = shown_cell(replace(column, signed=column.signed or signed), cell).replace("-", "−")
    return text.replace(" ", "\u00a0").replace("\u00a0(", " (")  # breaks before an interval alone


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
