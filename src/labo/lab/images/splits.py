"""Images with their labels, as a source delivers them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import DataError

if TYPE_CHECKING:
    from .image_files import FolderImages

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class ImageSplit:
    """Images and their labels."""

    images: Tensor | FolderImages  # (N, C, H, W) uint8, or files that are decoded one by one
    labels: Tensor  # (N,) int64

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, index: Tensor) -> ImageSplit:
        """The samples with these indices, (M,) int64."""
        images = self.images
        chosen = images[index] if isinstance(images, Tensor) else images.select(index)
        return ImageSplit(chosen, self.labels[index])


@dataclass(frozen=True)
class ImageSource:
    """A data set as it was published, before a part of it is held out; see :meth:`of`."""

    train: ImageSplit
    test: ImageSplit | None
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    valid: ImageSplit | None = None

    @classmethod
    def of(
        cls,
        train: tuple[Tensor | FolderImages, Tensor],
        test: tuple[Tensor | FolderImages, Tensor] | None = None,
        valid: tuple[Tensor | FolderImages, Tensor] | None = None,
        *,
        classes: Sequence[str],
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> ImageSource:
        """A data set of images with labels.

        Args:
            train: images, (N, C, H, W) uint8 or :class:`FolderImages`, and labels, (N,) int64.
            test: likewise; without it, parts of ``train`` are held out for testing and validation.
            valid: likewise; without it, a part of ``train`` is held out for validation.
            classes: their names, in the order of the labels.
            mean: per channel, of pixels in [0, 1]. By default that of the training images, or that
                of ImageNet for files.
            std: likewise.

        Example:
            >>> images, labels = torch.zeros(6, 1, 8, 8, dtype=torch.uint8), torch.arange(6) % 2
            >>> ImageSource.of((images, labels), classes=["cat", "dog"]).mean
            (0.0,)
        """
        if mean is None or std is None:
            measured: tuple[Sequence[float], Sequence[float]] = (IMAGENET_MEAN, IMAGENET_STD)
            if isinstance(train[0], Tensor) and train[0].dtype == torch.uint8:
                measured = channel_statistics(train[0])
            mean, std = mean or measured[0], std or measured[1]
        return cls(
            train=ImageSplit(*train),
            test=None if test is None else ImageSplit(*test),
            classes=tuple(classes),
            mean=tuple(mean),
            std=tuple(std),
            valid=None if valid is None else ImageSplit(*valid),
        )


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Means and deviations of the pixels of each channel, taken as numbers in [0, 1]."""
    values = torch.arange(256, dtype=torch.float64) / 255
    means, deviations = [], []
    for channel in images.unbind(1):
        counts = torch.bincount(channel.reshape(-1), minlength=256).double()
        share = counts / counts.sum()
        mean = (share * values).sum()
        means.append(mean.item())
        deviations.append((share * (values - mean).square()).sum().sqrt().item())
    return tuple(means), tuple(deviations)


def check_labels(labels: Tensor, num_classes: int, where: object) -> None:
    """Refuse labels outside [0, num_classes)."""
    wrong = torch.nonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        index = int(wrong[0])
        raise DataError(
            f"{where}: label {labels[index]} of sample {index} is outside [0, {num_classes})"
        )
