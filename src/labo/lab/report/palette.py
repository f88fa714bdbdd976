"""How methods are drawn: a colour, a dash pattern and a marker each.

Colours have a light and a dark value. Charts are drawn in the light ones. A page has both, as CSS
variables, and follows the reader's system. The first twelve methods of a page have different
markers, so they can be told apart without colour.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

COLOURS: dict[str, tuple[str, str]] = {  # light and dark
    "page": ("#fdfdfc", "#16181b"),
    "raised": ("#f5f5f2", "#1e2125"),
    "text": ("#1c1e21", "#e4e6e8"),
    "quiet": ("#5a6068", "#a3a9b1"),
    "rule": ("#dcdcd6", "#363b41"),
    "accent": ("#005c94", "#7cc0f5"),
    "broken": ("#a3261b", "#ff9c91"),
    "unfinished": ("#7a5a00", "#e6c34d"),
    # Methods. Readers who are colour-blind can tell them apart (after Okabe and Ito).
    "m0": ("#6b7078", "#a7adb5"),
    "m1": ("#0072b2", "#5cb3f0"),
    "m2": ("#bd4a06", "#ff9457"),
    "m3": ("#00835f", "#3fd0a2"),
    "m4": ("#a8508a", "#e495c8"),
    "m5": ("#8a6d00", "#e3bf3c"),
    "m6": ("#3f51a8", "#9aa8f5"),
    "m7": ("#8f2d3c", "#f08a98"),
}

OWN = ("base", "ls", "labo")  # drawn the same in every report: m0, m1, m2
_OTHER_COLOURS = ("m3", "m4", "m5", "m6", "m7")  # for the other methods in turn
DASHES: tuple[tuple[float, ...], ...] = ((), (7, 3), (2, 2.5), (9, 3, 2, 3), (4, 3))
_BAR = ((-0.4, -1), (0.4, -1), (0.4, 1), (-0.4, 1), (-0.4, -1))
MARKERS: tuple[Any, ...] = ("o", "s", "^", "D", "v", "X", "P", "<", _BAR, "d", ">", "h")


@dataclass(frozen=True)
class Style:
    """How the marks of a method look."""

    colour: str  # a name of ``COLOURS``, ``m0`` to ``m7``; on the page also a CSS class
    dash: int = 0  # an index of ``DASHES``
    marker: int = 0  # an index of ``MARKERS``, which are those of matplotlib


_OWN_STYLES = {"base": Style("m0", 2, 1), "ls": Style("m1", 1, 2), "labo": Style("m2", 0, 0)}


def styles(names: Iterable[tuple[str, int]]) -> dict[tuple[str, int], Style]:
    """A style for every variant, (method, its number from 0); those of a method share its colour.

    Example:
        >>> styles([("labo", 0), ("labo", 1)])["labo", 1]
        Style(colour='m2', dash=3, marker=3)
    """
    chosen = sorted(set(names))
    others = sorted({name for name, _ in chosen} - set(OWN))
    colours = {name: _OTHER_COLOURS[i % len(_OTHER_COLOURS)] for i, name in enumerate(others)}
    colours |= {name: style.colour for name, style in _OWN_STYLES.items()}
    chosen_styles, place = {}, len(OWN)
    for name, number in chosen:
        if number == 0 and name in OWN:
            chosen_styles[name, number] = _OWN_STYLES[name]
            continue
        # One more at every turn: a colour that comes again has another dash.
        dash = (place + place // len(DASHES)) % len(DASHES)
        chosen_styles[name, number] = Style(colours[name], dash, place % len(MARKERS))
        place += 1
    return chosen_styles


def light(name: str) -> str:
    """A colour as charts are drawn in it."""
    return COLOURS[name][0]


def variables() -> str:
    """The colours as CSS variables, light or dark as ``color-scheme`` says; and a class for each.

    Example:
        >>> variables().splitlines()[1:3]
        ['  color-scheme: light dark;', '  --page: light-dark(#fdfdfc, #16181b);']
    """
    lines = [f"  --{name}: light-dark({', '.join(both)});" for name, both in COLOURS.items()]
    classes = [f".{name} {{ --c: var(--{name}); }}" for name in COLOURS if name[1:].isdigit()]
    return "\n".join([":root {", "  color-scheme: light dark;", *lines, "}", *classes]) + "\n"
