"""labo: label regularization for PyTorch. LABO, and every method it competes with.

>>> import torch, labo
>>> loss = labo.LABOLoss(tau=1.25)
>>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
tensor(1.1205)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from . import functional, smoothing
    from .fused import parallel
    from .fused.adapted import LowRankWeight
    from .fused.dispatch import backends
    from .fused.linear import LinearLoss, LinearLossOptions, linear_loss
    from .losses import (
        LOSSES,
        AntiFocalLoss,
        BetaSmoothingLoss,
        ConfidencePenaltyLoss,
        CrossEntropyLoss,
        CSKDLoss,
        DistillationLoss,
        FocalLoss,
        GeneralizedEntropyLoss,
        KRLSLoss,
        LabelSmoothingLoss,
        LABOLoss,
        MaskedLabelSmoothingLoss,
        OnlineLabelSmoothingLoss,
        PSKDLoss,
        TFRegLoss,
        Warmup,
        WeightedLabelSmoothingLoss,
    )

__all__ = [
    "LOSSES",
    "AntiFocalLoss",
    "BetaSmoothingLoss",
    "CSKDLoss",
    "ConfidencePenaltyLoss",
    "CrossEntropyLoss",
    "DistillationLoss",
    "FocalLoss",
    "GeneralizedEntropyLoss",
    "KRLSLoss",
    "LABOLoss",
    "LabelSmoothingLoss",
    "LinearLoss",
    "LinearLossOptions",
    "LowRankWeight",
    "MaskedLabelSmoothingLoss",
    "OnlineLabelSmoothingLoss",
    "PSKDLoss",
    "TFRegLoss",
    "Warmup",
    "WeightedLabelSmoothingLoss",
    "__version__",
    "backends",
    "functional",
    "linear_loss",
    "parallel",
    "smoothing",
]

_MODULES = {"functional": "functional", "parallel": "fused.parallel", "smoothing": "smoothing"}
_HOMES = {
    "LinearLoss": "fused.linear",
    "LinearLossOptions": "fused.linear",
    "LowRankWeight": "fused.adapted",
    "backends": "fused.dispatch",
    "linear_loss": "fused.linear",
}


def __getattr__(name: str) -> Any:
    """Load a name when it is first used: the report and ``labo --help`` need no PyTorch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _MODULES:
        return importlib.import_module(f".{_MODULES[name]}", __name__)
    home = importlib.import_module(f".{_HOMES.get(name, 'losses')}", __name__)
    value = globals()[name] = getattr(home, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
