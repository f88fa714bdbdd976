"""The hyper-parameters of a loss as fields of its class, and what is derived from them.

.. code-block:: python

    class Scaled(Loss):
        factor: float = hyper(default=1.0, at_least=0.0, doc="factor of the cross entropy")

A field is the only place that has the name, the default, the range and the meaning of a
hyper-parameter. The constructor, the function, the checks, the help, the recipe keys and what the
operators of torch.compile take are made of the fields.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from torch import Tensor

from ._names import unknown_name

REQUIRED = inspect.Parameter.empty
POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD
KEYWORD = inspect.Parameter.KEYWORD_ONLY


@dataclass(frozen=True)
class Range:
    """The numbers that a hyper-parameter may have."""

    at_least: float = -math.inf
    above: float = -math.inf
    at_most: float = math.inf
    whole: bool = False

    def holds(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        finite = self.at_most < math.inf or abs(value) < math.inf
        return finite and self.at_least <= value <= self.at_most and value > self.above

    def __str__(self) -> str:
        number = "whole number" if self.whole else "number"
        if self.at_most < math.inf:
            return f"a {number} in [{self.at_least:g}, {self.at_most:g}]"
        if self.whole:
            return f"a whole number of {self.at_least:g} or more"
        if self.above > -math.inf:
            return f"a finite number above {self.above:g}"
        return f"a finite number of {self.at_least:g} or more"

    def check(self, name: str, value: object, word: str | None = None) -> None:
        """Refuse a value out of range; None, tensors and the ``word`` are not checked."""
        if value is None or isinstance(value, Tensor) or (word is not None and value == word):
            return
        if not self.holds(value):
            also = f' or "{word}"' if word and isinstance(value, str) else ""
            raise ValueError(f"{name} must be {self}{also}, got {value!r}")


UNIT = Range(at_least=0, at_most=1)
POSITIVE = Range(above=0)
NOT_NEGATIVE = Range(at_least=0)


@dataclass(frozen=True)
class Field:
    """A hyper-parameter."""

    default: Any  # or REQUIRED
    doc: str  # what it means, for every page and help
    range: Range | None  # of a number; None if there is none to check
    choices: tuple[str, ...]  # the words to choose from, if it is one of several
    word: str | None  # the word that may stand in place of a number
    kw_only: bool  # whether it is given by name
    module_only: bool  # whether the function does not have it, because it is about state
    name: str = ""
    kind: Any = None  # its type

    def check(self, value: object) -> None:
        """Refuse a value outside of the range or choices."""
        if self.choices:
            if value not in self.choices:
                raise ValueError(unknown_name(self.name, value, self.choices))
        elif self.range is not None:
            if value is None and type(None) not in get_args(self.kind):
                raise ValueError(f"{self.name} must be {self.range}, got None")
            self.range.check(self.name, value, self.word)
        elif self.kind is bool and not isinstance(value, bool):
            raise ValueError(f"{self.name} must be True or False, got {value!r}")

    def parameter(self) -> inspect.Parameter:
        kind = KEYWORD if self.kw_only else POSITIONAL
        return inspect.Parameter(self.name, kind, default=self.default, annotation=self.kind)


def hyper(
    *,
    default: Any = REQUIRED,
    doc: str,
    at_least: float | None = None,
    within: Range | None = None,
    choices: Sequence[str] = (),
    word: str | None = None,
    kw_only: bool = True,
    module_only: bool = False,
) -> Any:
    """Declare a hyper-parameter; see :class:`Field`. ``within`` is a range with a name."""
    if at_least is not None:
        within = Range(at_least)
    return Field(default, doc, within, tuple(choices), word, kw_only, module_only)


_STATE = object()


def state(*, init: bool) -> Any:
    """Declare an attribute that is no argument: a buffer, a parameter, a layer."""
    return _STATE


def collect(cls: type) -> dict[str, Field]:
    """The fields of a class, its own before those of its bases; the class attributes go.

    A type of int makes the range one of whole numbers.
    """
    hints = inspect.get_annotations(cls, eval_str=True)
    inherited: dict[str, Field] = {}
    for base in reversed(cls.__mro__[1:]):
        inherited |= vars(base).get("fields", {})
    own: dict[str, Field] = {}
    for name in list(vars(cls)):
        declared = vars(cls)[name]
        if declared is _STATE:
            delattr(cls, name)
        if not isinstance(declared, Field):
            continue
        delattr(cls, name)
        kind, limits = hints[name], declared.range
        if limits is not None and (kind is int or int in get_args(kind)):
            limits = replace(limits, whole=True)
        own[name] = replace(declared, name=name, kind=kind, range=limits)
    dropped = {*own, *getattr(cls, "without", ())}
    return own | {name: field for name, field in inherited.items() if name not in dropped}


def with_signature(
    name: str,
    parameters: Iterable[inspect.Parameter],
    call: Callable[..., Any],
    module: str,
    returns: Any,
) -> Callable[..., Any]:
    """A function of exactly these parameters, which passes their values to ``call``, in order.

    Python itself then binds the arguments and refuses wrong ones, as dataclasses do it.
    """
    listed = list(parameters)
    texts, starred = [], False
    for parameter in listed:
        if parameter.kind is KEYWORD and not starred:
            texts.append("*")
            starred = True
        default = "" if parameter.default is REQUIRED else f"=_{parameter.name}"
        texts.append(f"{parameter.name}{default}")
    values = ", ".join(parameter.name for parameter in listed)
    source = f"def {name}({', '.join(texts)}):\n    return _call({values})\n"
    scope: dict[str, Any] = {f"_{p.name}": p.default for p in listed} | {"_call": call}
    exec(source, scope)
    function: Callable[..., Any] = scope[name]
    function.__module__ = module
    function.__annotations__ = {
        p.name: p.annotation for p in listed if p.annotation is not REQUIRED
    }
    function.__annotations__["return"] = returns
    return function


# ------------------------------------------------------------------ for operators

# Operators of torch.compile take numbers, texts and tensors: a loss is a text and tensors there.
_CLASSES: dict[str, type] = {}


def register(cls: type) -> None:
    name = f"{cls.__module__}.{cls.__qualname__}"
    while _CLASSES.setdefault(name, cls) is not cls:
        name += "'"
    cls._registered = name  # type: ignore[attr-defined]


def describe(name: str, values: Mapping[str, Any]) -> tuple[str, list[Tensor]]:
    """Values as a text with a line for each, and the tensors that it refers to by number."""
    tensors: list[Tensor] = []
    lines = [name]
    for key, value in values.items():
        if isinstance(value, Tensor):
            lines.append(f"{key}=tensor {len(tensors)}")
            tensors.append(value)
        else:
            # float, because torch.compile may have made a variable of a number, and because the
            # repr of a float of another library has its type in it.
            plain = float(value) if isinstance(value, float) else value
            lines.append(f"{key}={plain!r}")
    return "\n".join(lines), tensors


def described(text: str, tensors: Sequence[Tensor]) -> tuple[type, dict[str, Any]]:
    """The inverse of :func:`describe`: the class and the values."""
    name, *lines = text.split("\n")
    if name not in _CLASSES:  # a graph that was compiled in another process
        importlib.import_module(name.rpartition(".")[0])
    values: dict[str, Any] = {}
    for line in lines:
        key, _, value = line.partition("=")
        if value.startswith("tensor "):
            values[key] = tensors[int(value.removeprefix("tensor "))]
        elif value in ("inf", "-inf", "nan"):
            values[key] = float(value)
        else:
            values[key] = ast.literal_eval(value)
    return _CLASSES[name], values
