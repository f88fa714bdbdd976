"""Every public name, with its arguments and defaults, is as recorded in public_surface.json.

After an intended change: LABO_WRITE_SURFACE=1 python -m pytest tests/project/test_public_surface.py
The changelog then says what changed and why.
"""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import Any

import labo
from labo import calibration, functional, parallel, smoothing
from labo.loss import Loss

RECORDED = Path(__file__).with_name("public_surface.json")
MODULES = (functional, smoothing, parallel, calibration)
# What a loss defines for the core, and what the core calls.
OF_THE_CORE = {name for name in vars(Loss) if name not in ("forward", "smoothing_weight")}


def parameters(of: Any) -> list[str]:
    """``name=default``, with the marks of positional-only and keyword-only arguments."""
    try:
        signature = inspect.signature(of)
    except ValueError:  # an exception without a constructor of its own
        return []
    found, keyword_only = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            found.append("*")
            keyword_only = True
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        found.append(f"{star}{parameter.name}{default}")
    return found


def members(cls: type) -> dict[str, Any]:
    """The constructor, and the public methods and properties that a user calls."""
    found: dict[str, Any] = {"()": parameters(cls)}
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith("labo"):
            continue
        for name, value in vars(base).items():
            if name.startswith("_") or (issubclass(cls, Loss) and name in OF_THE_CORE):
                continue
            if inspect.isfunction(value):
                found[name] = parameters(value)
            elif isinstance(value, property):
                found[name] = "property"
    return found


def described(value: Any) -> Any:
    if inspect.isclass(value):
        return members(value)
    return parameters(value) if callable(value) else type(value).__name__


def surface() -> dict[str, Any]:
    names = {f"labo.{name}": getattr(labo, name) for name in labo.__all__}
    for module in MODULES:
        path = "labo." + module.__name__.rpartition(".")[2]
        names |= {f"{path}.{name}": getattr(module, name) for name in module.__all__}
    listing = {name: described(value) for name, value in sorted(names.items())}
    listing["labo.LOSSES"] = {name: cls.__name__ for name, cls in labo.LOSSES.items()}
    return listing


def test_the_public_surface_is_as_recorded():
    found = json.loads(json.dumps(surface()))
    if "LABO_WRITE_SURFACE" in os.environ:
        RECORDED.write_text(json.dumps(found, indent=1) + "\n")
    recorded = json.loads(RECORDED.read_text())
    assert found.keys() == recorded.keys()
    for name in recorded:
        assert found[name] == recorded[name], name
