"""The losses, by family. ``LOSSES`` lists them by short name.

- :mod:`labo.losses.labo`: LABO, held LABO, the warm-up: the paper.
- :mod:`labo.losses.fixed`: label smoothing, masked, weighted, with a hand-designed teacher.
- :mod:`labo.losses.weights`: cross entropy with a penalty or with a weight for each sample.
- :mod:`labo.losses.adaptive`: labels that follow the prediction: GCE, GEM, Zipf, ACLS, adaptive.
- :mod:`labo.losses.teachers`: distillation and self-distillation.
- :mod:`labo.losses.tables`: tables of classes, and a learned confidence.

Losses with state need two calls from the training loop: ``step()`` after each optimizer step
(:class:`Warmup`, :class:`ConNetLoss`) and ``end_epoch()`` after each epoch
(:class:`OnlineLabelSmoothingLoss`, :class:`PSKDLoss`, :class:`DecoupledDistillationLoss`,
:class:`MaxSuppressionLoss`). Their state is in ``state_dict()``, so that a run can be resumed.
"""

from __future__ import annotations

from .._names import Registry
from ..loss import Loss
from . import adaptive, fixed, labo, tables, teachers, weights
from .adaptive import *  # noqa: F403
from .fixed import *  # noqa: F403
from .labo import *  # noqa: F403
from .labo import Warmup
from .tables import *  # noqa: F403
from .teachers import *  # noqa: F403
from .weights import *  # noqa: F403


def _all() -> list[type[Loss]]:
    """Every loss class of the families."""
    found: list[type[Loss]] = []
    for family in (weights, adaptive, fixed, teachers, tables, labo):
        for value in vars(family).values():
            if isinstance(value, type) and issubclass(value, Loss) and value not in found:
                found.append(value)
    return [cls for cls in found if cls is not Loss]


ALL = _all()
LOSSES = Registry("loss", {cls.name: cls for cls in ALL if cls.name is not None})

__all__ = ["LOSSES", Warmup.__name__]
__all__ += [cls.__name__ for cls in ALL if cls.__name__ != "ZLoss"]
__all__.sort()
