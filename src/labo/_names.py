"""Registries of names, and the error for a name that is in none. Needs no PyTorch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


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


def plain_name(name: object) -> str:
    """A name without case, hyphens, underscores and spaces: CS-KD, cs_kd and cskd are one."""
    return str(name).lower().translate(_SEPARATORS)


_SEPARATORS = str.maketrans("", "", "-_ ")


class Registry(dict[str, Any]):
    """A dict from names to objects, in any spelling; the error for an unknown one says the nearest.

    Example:
        >>> Registry("loss", {"cskd": 1, "ce": 2}, {"base": "ce"})["CS-KD"]
        1
    """

    def __init__(
        self, kind: str, entries: dict[str, Any], aliases: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(entries)
        self.kind = kind
        self._spellings = {plain_name(name): name for name in entries} | dict(aliases or {})

    def __missing__(self, name: object) -> Any:
        spelling = plain_name(name)
        if spelling in self._spellings:
            return self[self._spellings[spelling]]
        raise UnknownNameError(unknown_name(self.kind, name, self))
