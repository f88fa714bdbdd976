"""Registries of names, and the error for a name that is in none. Needs no PyTorch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, NoReturn


class UnknownNameError(KeyError):
    """A name that is not in a registry. The message lists the known names and the nearest one."""

    def __str__(self) -> str:
        return str(self.args[0])


def nearest(name: object, known: Iterable[str]) -> str | None:
    """The known name that is most similar to ``name``, or None if none is similar."""
    near = difflib.get_close_matches(str(name).lower(), list(known), n=1, cutoff=0.5)
    return near[0] if near else None


def unknown_name(kind: str, name: object, known: Iterable[str]) -> str:
    """The message for an unknown name, with the nearest known one.

    Example:
        >>> unknown_name("loss", "lobo", ["labo", "ls"])
        "unknown loss 'lobo'; did you mean 'labo'? (known: labo, ls)"
    """
    known = list(known)
    near = nearest(name, known)
    hint = "" if near is None else f"; did you mean {near!r}?"
    return f"unknown {kind} {name!r}{hint} (known: {', '.join(known)})"


class Registry(dict[str, Any]):
    """A dict from names to objects whose KeyError suggests the nearest known name."""

    def __init__(self, kind: str, entries: dict[str, Any]) -> None:
        super().__init__(entries)
        self.kind = kind

    def __missing__(self, name: str) -> NoReturn:
        raise UnknownNameError(unknown_name(self.kind, name, self))
