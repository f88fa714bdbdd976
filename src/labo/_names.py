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
    """A dict from names to objects. A name is found in any spelling and by its aliases.

    Example:
        >>> losses = Registry("loss", {"cs-kd": 1, "base": 2}, {"ce": "base"})
        >>> losses["CSKD"], losses["ce"], list(losses)
        (1, 2, ['cs-kd', 'base'])
    """

    def __init__(
        self, kind: str, entries: dict[str, Any], aliases: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(entries)
        self.kind = kind
        self._spellings = {plain_name(name): name for name in entries} | dict(aliases or {})

    def name_of(self, spelling: object) -> str:
        """The name for a spelling or an alias.

        Raises:
            UnknownNameError: there is none.
        """
        try:
            return self._spellings[plain_name(spelling)]
        except KeyError:
            raise UnknownNameError(unknown_name(self.kind, spelling, self)) from None

    def __missing__(self, spelling: object) -> Any:
        return self[self.name_of(spelling)]

    def __contains__(self, spelling: object) -> bool:
        return plain_name(spelling) in self._spellings

    def get(self, spelling: object, default: Any = None) -> Any:
        return super().get(self._spellings.get(plain_name(spelling), ""), default)
