"""Images with their labels, as a source delivers them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..errors import DataError

__all__ = ["ImageFiles", "ImageSplit", "Source", "channel_statistics", "check_labels"]


class ImageFiles(Protocol):
    """Images that are decoded when they are read; ``images[i]`` is (3, H, W) uint8."""

    @property
    def names(self) -> tuple[str, ...]:
        """The file names."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Tensor: ...

    def sizes(self) -> list[int]:
        """The sizes of the files in bytes."""

    def digests(self) -> Mapping[str, str]:
        """The SHA-256 of each file, by its name."""

    def select(self, index: Tensor) -> ImageFiles:
        """The images at the indices ``index``, (M,) int64."""


@dataclass(frozen=True)
class ImageSplit:
    """Images and their labels.

    Attributes:
        images: (N, C, H, W) uint8 in memory, or files that are decoded one by one.
        labels: (N,) int64.
    """

    images: Tensor | ImageFiles
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, index: Tensor) -> ImageSplit:
        """The samples with these indices, (M,) int64."""
        images = self.images
        chosen = images[index] if isinstance(images, Tensor) else images.select(index)
        return ImageSplit(chosen, self.labels[index])


@dataclass(frozen=True)
class Source:
    """A data set as it was published.

    Attributes:
        train: the training split, before a part of it is held out.
        test: the test split.
        classes: the names of the classes, in the order of the labels.
        mean: per channel, of the training pixels in [0, 1].
        std: likewise.
        valid: a validation split, if it was published with one.
    """

    train: ImageSplit
    test: ImageSplit
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    valid: ImageSplit | None = None


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel's pixels, taken as numbers in [0, 1].

    Args:
        images: (N, C, H, W) uint8.

    Returns:
        C means and C deviations.
    """
    values = torch.arange(256, dtype=torch.float64) / 255
    means, deviations = [], []
    for channel in images.unbind(1):
        counts = torch.bincount(channel.reshape(-1), minlength=256).double()
        share = counts / counts.sum()
        mean = (share * values).sum()
        means.append(mean.item())
        deviations.append((share * (values - mean).square()).sum().sqrt().item())
    return tuple(means), tuple(deviations)


def check_labels(labels: Tensor, num_classes: int, path: Path) -> None:
    """Refuse labels outside [0, num_classes)."""
    wrong = torch.nonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        index = int(wrong[0])
        raise DataError(
            f"{path}: label {labels[index]} of sample {index} is outside [0, {num_classes})"
        )
