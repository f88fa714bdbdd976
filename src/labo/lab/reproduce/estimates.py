"""Estimates of the GPU hours of runs at the scale of the paper.

Work is counted in floating point operations. A backward pass counts as two forward passes. The
total is divided by the operations that a GPU is assumed to do per second. The assumptions below
were not measured; expect an error of up to a factor of two.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from ..images.networks import CONVNETS
from ..translation.model import MODEL_PRESETS
from . import paper

# Operations per second that a V100 reaches in single precision (its limit is 15.7e12).
CONVOLUTIONS = 8e12
DEPTHWISE = 1e12  # MobileNetV2 is limited by memory bandwidth
TRANSFORMER = 6e12

# Forward passes of the model besides the one that is trained on.
EXTRA_PASSES = {"cs-kd": 1, "beta-ls": 1}

IMAGE_SIZE = {"cifar10": 32, "cifar100": 32, "imagenet": 224}
CLASSES = {"cifar10": 10, "cifar100": 100, "imagenet": 1000}

# Tokens of a sentence on each side, and the size of the target vocabulary, by the name of the data.
TOKENS = {"iwslt14": 25, "iwslt17": 25, "wmt14": 30}
TYPES = {"iwslt14": 10_000, "iwslt17": 16_000, "wmt14": 40_000}


@lru_cache
def forward_operations(model: str, classes: int, size: int) -> int:
    """Floating point operations of a forward pass on one image, counted on meta tensors.

    Example:
        >>> round(forward_operations("resnet50", 1000, 224) / 1e9, 1)
        8.2
    """
    with torch.device("meta"):
        network = CONVNETS[model](classes, 3).eval()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            network(torch.empty(1, 3, size, size))
    return counter.get_total_flops()


def image_hours(
    model: str, data: str, epochs: int, method: str = "base", teacher: str | None = None
) -> float:
    """GPU hours of an image classifier on data of ``IMAGE_SIZE``.

    Example:
        >>> round(image_hours("resnet50", "imagenet", epochs=90))
        98
    """
    facts = CLASSES[data], IMAGE_SIZE[data]
    passes = 3 + EXTRA_PASSES.get(method, 0)
    seconds = passes * forward_operations(model, *facts) / _speed(model)
    if teacher is not None:
        seconds += forward_operations(teacher, *facts) / _speed(teacher)
    return seconds * paper.SIZES[data][0] * epochs / 3600


def _speed(model: str) -> float:
    return DEPTHWISE if model == "mobilenet-v2" else CONVOLUTIONS


def text_hours(preset: str, data: str, sentences: int, epochs: int) -> float:
    """GPU hours of a translation model on so many pairs of data of ``TOKENS``.

    Example:
        >>> round(text_hours("iwslt", "iwslt14", 160_239, epochs=150), 1)
        6.1
    """
    width, ffn, layers = (MODEL_PRESETS[preset][key] for key in ("width", "ffn", "layers"))
    encoder = layers * (4 * width**2 + 2 * width * ffn)
    decoder = layers * (8 * width**2 + 2 * width * ffn) + width * TYPES[data]
    operations = 6 * (encoder + decoder) * TOKENS[data] * sentences
    return operations * epochs / TRANSFORMER / 3600
