"""The rows of a comparison and the points of their grids, as they are written on the command line.

The points are listed or have equal ratios. There is no sampler: an optimizer of hyper-parameters
would give each method another number and choice of trials, and make the comparison depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..errors import RequestError
from ..methods import METHODS, hyper_parameters, method_name


@dataclass(frozen=True)
class MethodSpec:
    """A row of the table: a method, perhaps with settings of its own."""

    label: str  # as it was asked for, ``labo``, ``labo:tau=1.05`` or ``labo:optim.lr=0.2``
    method: str  # its name in ``METHODS``
    settings: Mapping[str, str]  # a hyper-parameter, or a key of the recipe -> value, as text


@dataclass(frozen=True)
class GridAxis:
    """A grid's hyper-parameter: an override and its values; for one method, or for all."""

    key: str
    values: tuple[str, ...]
    method: str | None

    def applies_to(self, variant: MethodSpec) -> bool:
        return self.method in (None, variant.method) and self.key not in variant.settings

    @cached_property
    def numbers(self) -> list[float]:
        """The values in order; empty if they are not numbers."""
        return sorted(map(float, self.values)) if all(map(_is_number, self.values)) else []

    def is_edge(self, value: str) -> bool:
        """Whether a value is the smallest or the largest."""
        return len(self.numbers) > 1 and float(value) in (self.numbers[0], self.numbers[-1])

    def beyond(self, value: str) -> str | None:
        """The next value beyond one at the edge; None if there is none.

        It has the ratio to its neighbour that the neighbour has to the one before, if that is at
        least 1.5, else the difference.

        Example:
            >>> GridAxis("tau", ("1.05", "1.15", "1.25"), "labo").beyond("1.25")
            '1.35'
            >>> GridAxis("optim.lr", ("0.01", "0.1", "1"), None).beyond("0.01")
            '0.001'
        """
        if not self.is_edge(value):
            return None
        here = float(value)
        neighbour = self.numbers[1 if here == self.numbers[0] else -2]
        ratio = here / neighbour if neighbour else 0.0
        geometric = ratio > 0 and max(ratio, 1 / ratio) >= 1.5
        following = here * ratio if geometric else 2 * here - neighbour
        whole = all(text.isdecimal() for text in self.values)
        text = str(round(following)) if whole else f"{following:.4g}"
        return None if text in self.values else text

    def extended(self, value: str) -> GridAxis:
        """The axis with one more value."""
        first = float(value) < self.numbers[0]
        values = (value, *self.values) if first else (*self.values, value)
        return replace(self, values=values)


Place = tuple[tuple[GridAxis, str], ...]  # a point of a grid


def read_methods(names: Sequence[str]) -> list[MethodSpec]:
    """The rows of a table; each ``NAME[:KEY=VALUE]...``. A key with a dot is one of the recipe."""
    variants = []
    for text in names:
        name, *settings = text.split(":")
        pairs = [setting.partition("=") for setting in settings]
        if not all(key and equals and value for key, equals, value in pairs):
            raise RequestError(f"--methods {text}: write NAME:HYPER=VALUE, as in labo:tau=1.15")
        for key, _, _ in pairs:
            if key.partition(".")[0] in ("method", "seed"):
                raise RequestError(f"--methods {text}: {key} is not a setting of a row")
        method = method_name(name)
        label = ":".join([method, *settings])
        variants.append(MethodSpec(label, method, {key: value for key, _, value in pairs}))
    labels = [variant.label for variant in variants]
    if twice := {label for label in labels if labels.count(label) > 1}:
        raise RequestError(f"--methods: {', '.join(sorted(twice))} is given twice")
    return variants


def read_grid(texts: Iterable[str], variants: Sequence[MethodSpec], task: str) -> list[GridAxis]:
    """The axes of a grid, each for the methods it is meant for.

    ``tau=1.15,1.25`` is for the one method that has it, ``labo.tau=1.15,1.25`` names the method,
    ``optim.lr=0.1,0.2`` is for all methods, ``optim.lr=0.01..1@6`` has six values.
    """
    listed = list(dict.fromkeys(variant.method for variant in variants))
    axes = []
    for text in texts:
        key, _, listing = text.partition("=")
        values = _spaced(text, listing) if ".." in listing else tuple(listing.split(","))
        if not key or not all(values) or len(set(values)) < len(values):
            raise RequestError(
                f"--grid {text}: write a key and its different values, as in tau=1.15,1.25"
            )
        owner, dot, hyper = key.rpartition(".")
        if dot and owner not in METHODS:  # a key of the recipe
            axes.append(GridAxis(key, values, None))
            continue
        owners = [name for name in listed if hyper in hyper_parameters(name, task).model_fields]
        if dot:
            owners = [name for name in owners if name == owner]
        if len(owners) > 1:
            raise RequestError(
                f"--grid {text}: {' and '.join(owners)} have {hyper}; write {owners[-1]}.{text}"
            )
        if not owners:
            raise RequestError(f"--grid {text}: no method of {', '.join(listed)} has {key}")
        axes.append(GridAxis(hyper, values, owners[0]))
    return axes


def _spaced(text: str, listing: str) -> tuple[str, ...]:
    """The values of ``FIRST..LAST@NUMBER``: each has the same ratio to the one before."""
    ends, _, number = listing.partition("@")
    first, _, last = ends.partition("..")
    if not (_is_number(first) and _is_number(last) and number.isdecimal()):
        raise RequestError(f"--grid {text}: write FIRST..LAST@NUMBER, as in optim.lr=0.01..1@6")
    low, high, count = float(first), float(last), int(number)
    if not 0 < low < high or not 2 <= count <= 100:
        raise RequestError(
            f"--grid {text}: values with equal ratios need 0 < FIRST < LAST and 2 to 100 values"
        )
    ratio = (high / low) ** (1 / (count - 1))
    return tuple(f"{low * ratio**index:.4g}" for index in range(count))


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def shared(place: Place) -> Place:
    """The part of a place that all methods have."""
    return tuple((axis, value) for axis, value in place if axis.method is None)
