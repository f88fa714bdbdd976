"""scikit-learn's handwritten digits: 1797 grey images of 8x8 pixels, installed with it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import DataError
from ..run.seeds import permutation
from .splits import ImageSource, ImageSplit, channel_statistics

__all__ = ["load_digits"]

_TEST_SHARE = 0.2
_WHITE = 16  # the brightest pixel in scikit-learn's counts


def _is_test(labels: Tensor) -> Tensor:
    """Which samples form the test split: a fifth of each class, always the same one."""
    order = permutation(0, 0, len(labels), stream="digits")
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(10):
        members = order[labels[order] == label]
        chosen[members[: round(_TEST_SHARE * len(members))]] = True
    return chosen


def load_digits() -> ImageSource:
    """The digits, a fixed stratified fifth of them as test split."""
    try:
        from sklearn import datasets
    except ImportError as error:
        raise DataError("the digits come with scikit-learn: pip install scikit-learn") from error
    pixels, target = datasets.load_digits(return_X_y=True)
    images = (torch.from_numpy(pixels) * (255 / _WHITE)).round().to(torch.uint8).view(-1, 1, 8, 8)
    digits = ImageSplit(images, torch.from_numpy(target).long())
    in_test = _is_test(digits.labels)
    train = torch.nonzero(~in_test).squeeze(1)
    test = torch.nonzero(in_test).squeeze(1)
    mean, std = channel_statistics(images[train])
    return ImageSource(digits.select(train), digits.select(test), tuple("0123456789"), mean, std)
