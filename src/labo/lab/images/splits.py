"""Images with their labels, as a source delivers them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..errors import DataError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


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
    """Images and their labels."""

    # (N, C, H, W) uint8 in memory, or files that are decoded one by one
    images: Tensor | ImageFiles
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
    """A data set as it was published.

    Attributes:
        train: the training split, before a part of it is held out.
        test: the test split; None if the data were published without splits.
        classes: the names of the classes, in the order of the labels.
        mean: per channel, of the training pixels in [0, 1].
        std: likewise.
        valid: a validation split, if it was published with one.
    """

    train: ImageSplit
    test: ImageSplit | None
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    valid: ImageSplit | None = None

    @classmethod
    def of(
        cls,
        train: tuple[Tensor | ImageFiles, Tensor],
        test: tuple[Tensor | ImageFiles, Tensor] | None = None,
        valid: tuple[Tensor | ImageFiles, Tensor] | None = None,
        *,
        classes: Sequence[str],
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> ImageSource:
        """A data set of images with labels.

        Args:
            train: images, (N, C, H, W) uint8 or files such as :class:`FolderImages`, and labels,
                (N,) int64.
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
            found: tuple[Sequence[float], Sequence[float]] = (IMAGENET_MEAN, IMAGENET_STD)
            if isinstance(train[0], Tensor) and train[0].dtype == torch.uint8:
                found = channel_statistics(train[0])
            mean, std = mean or found[0], std or found[1]
        return cls(
            train=ImageSplit(*train),
            test=None if test is None else ImageSplit(*test),
            classes=tuple(classes),
            mean=tuple(mean),
            std=tuple(std),
            valid=None if valid is None else ImageSplit(*valid),
        )


def check_source(source: object, where: str) -> ImageSource:
    """What a function of the user returned, if it is a data set whose parts fit together.

    Raises:
        DataError: it is not; the message begins with ``where``.
    """
    if not isinstance(source, ImageSource):
        kind = type(source).__name__
        raise DataError(f"{where} must return an ImageSource (labo.lab.ImageSource), not {kind}")
    if len(source.classes) < 2:
        raise DataError(f"{where}: there must be at least 2 classes, not {len(source.classes)}")
    if len(source.mean) != len(source.std) or not all(spread > 0 for spread in source.std):
        raise DataError(f"{where}: mean and std must have a number per channel, std above 0")
    for name in ("train", "valid", "test"):
        split: ImageSplit | None = getattr(source, name)
        if split is not None:
            _check_split(split, source, f"{where}: {name}")
    return source


def _check_split(split: ImageSplit, source: ImageSource, where: str) -> None:
    images, labels = split.images, split.labels
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64 or labels.dim() != 1:
        raise DataError(f"{where}: labels must be an int64 tensor (N,), not {_described(labels)}")
    if isinstance(images, Tensor):
        if images.dtype != torch.uint8 or images.dim() != 4:
            raise DataError(
                f"{where}: images must be a uint8 tensor (N, C, H, W), not {_described(images)}"
            )
        if images.shape[1] != len(source.mean):
            raise DataError(
                f"{where}: the images have {images.shape[1]} channels, mean has {len(source.mean)}"
            )
        first = source.train.images
        if isinstance(first, Tensor) and images.shape[1:] != first.shape[1:]:
            raise DataError(
                f"{where}: images of {_described(images)}, but those of train are "
                f"{_described(first)}"
            )
    elif not all(hasattr(images, name) for name in ("names", "sizes", "digests", "select")):
        raise DataError(
            f"{where}: images must be a uint8 tensor (N, C, H, W) or FolderImages, not "
            f"{_described(images)}"
        )
    if len(images) != len(labels):
        raise DataError(f"{where}: {len(images)} images, but {len(labels)} labels")
    check_labels(labels, len(source.classes), Path(where))


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return f"a {type(value).__name__}"


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


def check_labels(labels: Tensor, num_classes: int, path: Path) -> None:
    """Refuse labels outside [0, num_classes)."""
    wrong = torch.nonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        index = int(wrong[0])
        raise DataError(
            f"{path}: label {labels[index]} of sample {index} is outside [0, {num_classes})"
        )
