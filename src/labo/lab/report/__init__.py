"""``labo report``: runs -> one HTML page that needs nothing else, neither network nor torch.

``gather`` reads the run directories, ``results`` and ``figures`` say what is shown, ``charts``
draws, ``embed`` prepares what the page's scripts work on, and ``page.html.j2`` sets it all.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from ... import __version__
from ..errors import RequestError
from ..run import files as atomic
from ..tables import NOTHING, Cell, Column
from . import embed, figures, results
from .gather import TRANSLATION, Group, Listing, make_groups, method_text, read_runs

_HERE = Path(__file__).parent
_SCRIPTS = ("page.js", "explorer.js", "sentences.js")

__all__ = ["write_report"]


def write_report(paths: Iterable[str | Path], out: str | Path) -> list[Listing]:
    """Write a page about runs.

    Args:
        paths: run directories. One that is broken or half done is listed as such.
        out: the HTML file.

    Returns:
        The runs as they stand.

    Raises:
        RequestError: if none of them can be reported.
    """
    listings = read_runs(dict.fromkeys(Path(path) for path in paths))
    usable = [listing.entry for listing in listings if listing.entry]
    if not usable:
        reasons = "; ".join(str(listing.state.reason) for listing in listings)
        raise RequestError(f"nothing to report: {reasons}")
    out = Path(out)
    if not out.parent.is_dir():
        raise RequestError(f"there is no folder {out.parent} to write {out.name} to")
    atomic.refuse_foreign(out, b'<meta name="generator" content="labo ')
    page = _render(listings, make_groups(usable))
    # A lone surrogate from a record's JSON has no UTF-8.
    atomic.write_text(out, page.encode("utf-8", "replace").decode())
    return listings


def _render(listings: Sequence[Listing], groups: Sequence[Group]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"embedded": _embedded, "shown": _shown}
    scripts = [(_HERE / name).read_text(encoding="utf-8") for name in _SCRIPTS]
    drawn = figures.first_labo(variant for group in groups for variant in group.variants)
    explorer = embed.explorer_data(groups)
    return environment.get_template("page.html.j2").render(
        version=__version__,
        style=Markup((_HERE / "style.css").read_text(encoding="utf-8")),
        scripts=[Markup(script) for script in scripts],
        script_hashes=" ".join(f"'sha256-{_digest(script)}'" for script in scripts),
        listings=listings,
        method_text=method_text,
        groups=[_group_context(group, place) for place, group in enumerate(groups)],
        sentences=embed.sentence_data(groups),
        label=figures.label_figure(drawn, "label") if drawn else None,
        explorer=explorer,
        left_out=_left_out(listings, groups),
    )


def _group_context(group: Group, place: int) -> dict[str, Any]:
    """What the template shows of a group; empty where there is no data."""
    name = f"g{place}"
    is_translation = group.task == TRANSLATION
    return {
        "title": group.title,
        "task": group.task,
        "split": group.split,
        "colours": {variant.label: variant.key for variant in group.variants},
        "results": results.results_table(group),
        "sure": results.sure_differences(group),
        "unfair": results.unfair(group),
        "training": figures.training_figures(group, name),
        "confidence_table": results.confidence_table(group),
        "under_confidence": results.under_confidence(group),
        "confidence": figures.confidence_figures(group, name),
        "frequency_table": results.frequency_table(group) if is_translation else None,
        "translation": figures.translation_figures(group, name) if is_translation else [],
    }


def _left_out(listings: Sequence[Listing], groups: Sequence[Group]) -> list[str]:
    """What the page lacks, and what would bring it."""
    reasons: dict[str, list[str]] = {}
    for listing in listings:
        entry = listing.entry
        if entry is None:
            continue
        notes = list(entry.analysis["notes"])
        if listing.state.kind == "unfinished":
            notes.append("no results yet")
        if not entry.analysis["labels"]:
            notes.append("no samples to draw labels of")
        for note in notes:
            reasons.setdefault(note, []).append(listing.name)
    for group in groups:
        if not any("entropy" in entry.analysis["training"]["valid"] for entry in group.entries):
            reasons["no confidence over training: the metrics lack entropy"] = [group.title]
    return [f"{', '.join(names)}: {note}" for note, names in reasons.items()]


# ------------------------------------------------------------------ for the template


def _embedded(value: Any) -> Markup:
    """JSON that cannot end the script element it stands in, whatever a sentence holds."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _shown(cell: Cell, column: Column, signed: bool) -> str:
    if cell.value is None:
        return NOTHING
    spread = "" if cell.spread is None else f" ± {cell.spread * column.scale:.{column.digits}f}"
    column = replace(column, signed=column.signed or signed)
    return column.shown(cell.value).replace("-", "−") + spread


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
