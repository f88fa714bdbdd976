"""Writes src/labo/functional.pyi, from which editors and type checkers know the derived functions.

    python tools/functional_stub.py

A test compares the file with :func:`stub`.
"""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labo import functional

SOURCE = Path(__file__).parents[1] / "src" / "labo" / "functional.py"
OUT = SOURCE.with_suffix(".pyi")
HEAD = '''\
# Written by `python tools/functional_stub.py` from the classes in labo/losses. Do not edit.
"""{summary}"""

import torch
from torch import Tensor

'''


def stub() -> str:
    """The file, formatted."""
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    text = HEAD.format(summary=(ast.get_docstring(tree) or "").partition("\n")[0])
    for name in vars(functional)["__all__"]:
        text += _function(name, getattr(functional, name))
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(OUT), "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    return done.stdout


def _function(name: str, function: Callable[..., Any]) -> str:
    parameters, keyword_only = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            parameters.append("*")
            keyword_only = True
        kind = parameter.annotation
        kind = kind if isinstance(kind, str) else inspect.formatannotation(kind)
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        parameters.append(f"{parameter.name}: {_short(kind)}{default}")
    doc = inspect.getdoc(function) or ""
    doc = textwrap.indent("\n".join(_wrapped(line) for line in doc.splitlines()), "    ").lstrip()
    return f'def {name}({", ".join(parameters)}) -> Tensor:\n    r"""{doc}\n    """\n\n'


def _short(kind: str) -> str:
    """A type as a user writes it."""
    return kind.replace("torch.Tensor", "Tensor").replace("torch._C.", "torch.")


def _wrapped(line: str) -> str:
    """A line of at most 96 columns; what follows is indented, as in a list of arguments."""
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(
        line, 94, subsequent_indent=f"{indent}    ", drop_whitespace=True, break_on_hyphens=False
    )


if __name__ == "__main__":
    OUT.write_text(stub(), encoding="utf-8")
    print(f"wrote {OUT}")
