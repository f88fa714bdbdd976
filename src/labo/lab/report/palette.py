"""The colours of the report and of its figures: CSS variables, each with a light and a dark value.

A page has both and follows the reader's system. A figure in a file of its own has the light ones.
"""

from __future__ import annotations

LIGHT, DARK = 0, 1

COLOURS: dict[str, tuple[str, str]] = {
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

OWN_COLOURS = {"base": "m0", "ls": "m1", "labo": "m2"}  # the same in every report
OTHER_COLOURS = ("m3", "m4", "m5", "m6", "m7")  # for the other methods in turn


def variables(theme: int | None = None) -> str:
    """The colours as a CSS rule.

    Args:
        theme: ``LIGHT`` or ``DARK``; if not given, both, chosen by ``color-scheme``.

    Example:
        >>> variables(LIGHT).splitlines()[1]
        '  --page: #fdfdfc;'
        >>> variables().splitlines()[1:3]
        ['  color-scheme: light dark;', '  --page: light-dark(#fdfdfc, #16181b);']
    """
    lines = [] if theme is not None else ["  color-scheme: light dark;"]
    for name, both in COLOURS.items():
        value = f"light-dark({both[LIGHT]}, {both[DARK]})" if theme is None else both[theme]
        lines.append(f"  --{name}: {value};")
    return "\n".join([":root {", *lines, "}"]) + "\n"
