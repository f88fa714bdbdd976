"""The losses, by family, each loaded when one of its classes is first used.

- :mod:`labo.losses.labo`: LABO, held LABO, the warm-up: the paper.
- :mod:`labo.losses.weights`: cross entropy with a penalty or with a weight for each sample.
- :mod:`labo.losses.adaptive`: labels that follow the prediction: GCE, GEM, Zipf, ACLS, adaptive.
- :mod:`labo.losses.fixed`: label smoothing, masked, weighted, with a hand-designed teacher.
- :mod:`labo.losses.teachers`: distillation and self-distillation.
- :mod:`labo.losses.tables`: tables of classes, and a learned confidence.

``LOSSES`` has them by name. Losses with state need two calls from the training loop:
``step()`` after each optimizer step (:class:`Warmup`, :class:`ConNetLoss`) and ``end_epoch()``
after each epoch (:class:`OnlineLabelSmoothingLoss`, :class:`PSKDLoss`,
:class:`DecoupledDistillationLoss`, :class:`MaxSuppressionLoss`). Their state is in
``state_dict()``, so that a run can be resumed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .._names import Registry

if TYPE_CHECKING:
    from ..loss import Loss
    from .adaptive import *  # noqa: F403
    from .fixed import *  # noqa: F403
    from .labo import *  # noqa: F403
    from .tables import *  # noqa: F403
    from .teachers import *  # noqa: F403
    from .weights import *  # noqa: F403

    ALL: list[type[Loss]]
    LOSSES: Registry

# A new file of losses is listed here, and above for type checkers.
FAMILIES = ("weights", "adaptive", "fixed", "teachers", "tables", "labo")
FUNCTION_ONLY = ("ZLoss",)  # not among the public classes


def __getattr__(name: str) -> Any:
    """A class of a family, a family, or one of the lists ``ALL``, ``LOSSES`` and ``__all__``."""
    if name in ("ALL", "LOSSES", "__all__"):
        globals().update(_lists())
        return globals()[name]
    if name in FAMILIES:
        return importlib.import_module(f".{name}", __name__)
    for family in () if name.startswith("_") else ("labo", *FAMILIES):  # LABO needs no other
        if name in (classes := _classes(family)):
            value = globals()[name] = classes[name]
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})


def _classes(family: str) -> dict[str, type]:
    """The public classes that a family defines."""
    module = importlib.import_module(f".{family}", __name__)
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__ and name[0] != "_"
    }


def _lists() -> dict[str, Any]:
    classes = {name: cls for family in FAMILIES for name, cls in _classes(family).items()}
    losses: list[Any] = [cls for cls in classes.values() if hasattr(cls, "function_name")]
    return {
        "ALL": losses,
        "LOSSES": Registry(
            "loss", {cls.name: cls for cls in losses if cls.name is not None}, {"ce": "base"}
        ),
        "__all__": sorted({"LOSSES", *classes} - {*FUNCTION_ONLY}),
    }
