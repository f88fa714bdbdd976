"""labo: label regularization for PyTorch. LABO, and every method it competes with.

>>> import torch, labo
>>> loss = labo.LABOLoss(tau=1.25)
>>> loss(torch.tensor([[2.0, 1.0, 0.1, -1.0]]), torch.tensor([0]))
tensor(1.1205)
"""

from . import functional, smoothing
from ._version import __version__
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
    "smoothing",
]
