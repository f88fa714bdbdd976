"""Registries of names, and the error for a name that is in none. Needs no PyTorch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, NoReturn


class UnknownNameError(KeyError):
    """A name that is not in a registry."""

    def __str__(self) -> str:
        return str(self.args[0])


def unknown_name(kind: str, name: object, known: Iterable[str]) -> str:
    """The message for an unknown name: the nearest known name, or else all of them.

    Example:
        >>> unknown_name("loss", "lobo", ["labo", "ls"])
        "unknown loss 'lobo'; did you mean 'labo'?"
    """
    known = list(known)
    near = difflib.get_close_matches(str(name).lower(), known, n=1, cutoff=0.5)
    if near:
        return f"unknown {kind} {name!r}; did you mean {near[0]!r}?"
    return f"unknown {kind} {name!r} (known: {', '.join(known)})"


class Registry(dict[str, Any]):
    """A dict from names to objects whose KeyError suggests the nearest known name."""

    def __init__(self, kind: str, entries: dict[str, Any]) -> None:
        super().__init__(entries)
        self.kind = kind

    def __missing__(self, name: str) -> NoReturn:
        raise UnknownNameError(unknown_name(self.kind, name, self))
