"""Handwritten digits: 1797 grey images of 8x8 pixels. They come with the package."""

from __future__ import annotations

import gzip
from pathlib import Path

import torch
from torch import Tensor

from ..run.seeds import permutation
from .splits import ImageSource

_FILE = Path(__file__).with_name("data") / "digits.csv.gz"
_TEST_SHARE = 0.2
_WHITE = 16  # the brightest pixel in the file


def _is_test(labels: Tensor) -> Tensor:
    """Which samples form the test split: a fifth of each class, always the same one."""
    order = permutation(0, 0, len(labels), stream="digits")
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(10):
        members = order[labels[order] == label]
        chosen[members[: round(_TEST_SHARE * len(members))]] = True
    return chosen


def read_digits() -> tuple[Tensor, Tensor]:
    """All images, as rows of 64 pixels from 0 (black) to 1, and their labels. Needs torch alone."""
    with gzip.open(_FILE, "rt", encoding="ascii") as lines:
        rows = torch.tensor([[int(value) for value in line.split(",")] for line in lines])
    return rows[:, :-1] / _WHITE, rows[:, -1]


def load_digits() -> ImageSource:
    """The digits, a fixed stratified fifth of them as test split."""
    pixels, labels = read_digits()
    images = (pixels * 255).round().to(torch.uint8).view(-1, 1, 8, 8)
    test = _is_test(labels)
    return ImageSource.of(
        (images[~test], labels[~test]), (images[test], labels[test]), classes="0123456789"
    )
