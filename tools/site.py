"""Build steps of the documentation site, used by ``mkdocs.yml``.

:class:`Docstrings` rewrites the reStructuredText in docstrings (roles, ``.. math::``, tables) as
Markdown, which mkdocstrings expects. :class:`MathML` turns formulas into MathML, so that a page
needs neither a script nor a download to show them.
"""

from __future__ import annotations

import html
import importlib
import re
from typing import Any

import griffe
from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.postprocessors import Postprocessor

_ROLE = re.compile(r":(?:func|class|meth|mod|data|attr|obj):`(~?)([\w.]+)`")
_INLINE_MATH = re.compile(r":math:`([^`]+)`")
_MATH_LINE = re.compile(r"^( *)\.\. math:: +(\S.*)$", re.MULTILINE)
_MATH_BLOCK = re.compile(r"^( *)\.\. math::\n((?:\1 +\S.*\n?)+)", re.MULTILINE)
_TABLE = re.compile(r"^( *)=+  [= ]+\n(?:.*\n)*?\1=+  [= ]+\n(?:.*\n)*?\1=+  [= ]+$", re.MULTILINE)
_HEADINGS = {"Example:": "Examples:", "Reference:": "References:"}
# "log p" needs a space that the converter leaves out.
_FUNCTION = re.compile(r"(<mi>(?:log|max)</mi>)(?=<m(?:i|sub|row)>)")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def to_markdown(text: str, owner: griffe.Object | None = None) -> str:
    """A docstring as Markdown in Google style.

    Args:
        text: the docstring.
        owner: the object it describes; names in it are looked up from there.
    """

    def reference(match: re.Match[str]) -> str:
        short, name = match[1], match[2]
        shown = name.rpartition(".")[2] if short else name
        # "optional" leaves plain text where the target has no page.
        target = html.escape(_full_name(name, owner))
        return f'<autoref optional identifier="{target}"><code>{shown}</code></autoref>'

    text = _TABLE.sub(lambda m: f"{m[1]}```text\n{m[0]}\n{m[1]}```", text)
    text = _ROLE.sub(reference, text)
    text = _INLINE_MATH.sub(r"$\1$", text)
    text = _MATH_LINE.sub(r"\1$$\n\1\2\n\1$$", text)
    text = _MATH_BLOCK.sub(lambda m: f"{m[1]}$$\n{m[2].rstrip()}\n{m[1]}$$\n", text)
    lines = [_HEADINGS.get(line, line) for line in text.splitlines()]
    return "\n".join(lines)


def _full_name(name: str, owner: griffe.Object | None) -> str:
    try:
        return name if owner is None or name.startswith("labo") else owner.resolve(name)
    except griffe.NameResolutionError:
        return name


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = obj.docstring.value
            if obj.is_class and obj.path.startswith("labo.losses."):  # with its arguments
                text = getattr(importlib.import_module(obj.module.path), obj.name).__doc__
            obj.docstring.value = to_markdown(text, obj)


class _Formulas(Postprocessor):  # type: ignore[misc]
    """Replaces the formulas that pymdownx.arithmatex has marked by MathML."""

    def run(self, text: str) -> str:
        return _FORMULA.sub(_to_mathml, text)


def _to_mathml(match: re.Match[str]) -> str:
    display = "block" if match[1] == "div" else "inline"
    mathml = convert(html.unescape(match[2]).strip(), display=display)
    return _FUNCTION.sub(r'\1<mspace width="0.17em"/>', mathml)


class MathML(Extension):  # type: ignore[misc]
    """A Markdown extension; it runs after arithmatex and the restoring of raw HTML."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.postprocessors.register(_Formulas(md), "mathml", 0)
