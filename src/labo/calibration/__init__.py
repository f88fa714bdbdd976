"""Calibration: measure it, fit a temperature, and fold the temperature into a model.

>>> import torch
>>> logits = torch.tensor([[0.9, 0.1]]).log().expand(4, 2)
>>> target = torch.tensor([0, 0, 0, 1])  # 90 % sure, 75 % right
>>> round(expected_calibration_error(logits, target), 4)
0.15
>>> round(fit_temperature(logits, target).temperature, 4)
2.0
"""

from __future__ import annotations

from .folding import fold_temperature
from .measures import (
    ReliabilityBins,
    adaptive_calibration_error,
    brier_score,
    classwise_calibration_error,
    expected_calibration_error,
    maximum_calibration_error,
    reliability_bins,
)
from .temperature import TemperatureError, TemperatureFit, fit_temperature

__all__ = [
    "ReliabilityBins",
    "TemperatureError",
    "TemperatureFit",
    "adaptive_calibration_error",
    "brier_score",
    "classwise_calibration_error",
    "expected_calibration_error",
    "fit_temperature",
    "fold_temperature",
    "maximum_calibration_error",
    "reliability_bins",
]
