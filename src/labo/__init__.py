"""labo: label regularization for PyTorch. LABO, and the methods it is compared with.

>>> import torch, labo
>>> loss = labo.LABOLoss(tau=1.25)
>>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
tensor(1.1205)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from . import calibration as calibration
    from . import functional as functional
    from . import smoothing as smoothing
    from .fast.dispatch import backends as backends
    from .heads import parallel as parallel
    from .heads.low_rank import LowRankWeight as LowRankWeight
    from .heads.quantized import QuantizedWeight as QuantizedWeight
    from .label import label_of as label_of
    from .linear import LinearLoss as LinearLoss
    from .linear import LinearLossOptions as LinearLossOptions
    from .linear import TeacherHead as TeacherHead
    from .linear import linear_loss as linear_loss
    from .losses import *  # noqa: F403
    from .metrics import LossMetrics as LossMetrics

_MODULES = {
    "calibration": "calibration",
    "functional": "functional",
    "parallel": "heads.parallel",
    "smoothing": "smoothing",
}
_HOMES = {
    "LinearLoss": "linear",
    "LinearLossOptions": "linear",
    "LossMetrics": "metrics",
    "LowRankWeight": "heads.low_rank",
    "QuantizedWeight": "heads.quantized",
    "TeacherHead": "linear",
    "backends": "fast.dispatch",
    "label_of": "label",
    "linear_loss": "linear",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: ``labo --help`` needs no PyTorch.

    Public are the names above and those of :mod:`labo.losses`, which are capitalized.
    """
    if name == "__all__":
        return sorted([*_MODULES, *_HOMES, *_losses().__all__, "__version__"])
    if name in _MODULES:
        return importlib.import_module(f".{_MODULES[name]}", __name__)
    if name in _HOMES:
        value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    else:
        value = getattr(_losses(), name, None) if name[0].isupper() else None
        if value is None or name in _losses().FUNCTION_ONLY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _losses() -> Any:
    return importlib.import_module(".losses", __name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
