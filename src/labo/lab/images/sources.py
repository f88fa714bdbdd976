"""Image data sets: those that are built in, and those in the usual formats on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..._names import unknown_name
from ..custom import call_function, is_reference
from ..errors import DataError
from ..run.distributed import once
from ..run.seeds import permutation
from .cifar import load_cifar
from .digits import load_digits
from .folders import load_folders
from .idx import load_idx
from .image_files import FolderImages
from .splits import ImageSource, ImageSplit, check_labels

HASHED_BYTES = 8 << 30  # the most bytes of image files that are hashed for a fingerprint

_HELD_OUT = 200  # images of a split that is held out automatically, where there are enough

BUILT_IN: dict[str, Callable[[], ImageSource]] = {"digits": load_digits}
ON_DISK: dict[str, Callable[[Path], ImageSource]] = {
    "cifar10": partial(load_cifar, "cifar10"),
    "cifar100": partial(load_cifar, "cifar100"),
    "mnist": partial(load_idx, "mnist"),
    "fashion-mnist": partial(load_idx, "fashion-mnist"),
    "folder": load_folders,
}


@dataclass(frozen=True)
class ImageDataset:
    """A data set ready for training."""

    train: ImageSplit
    valid: ImageSplit  # to select a model on; empty if nothing was held out
    test: ImageSplit
    classes: tuple[str, ...]  # in the order of the labels
    mean: tuple[float, ...]  # per channel, of pixels in [0, 1], before the hold-out
    std: tuple[float, ...]
    # SHA-256 of the images and labels, whatever their format and hold-out. For folders it covers
    # the names and contents of the files, or, of more than HASHED_BYTES, their names and sizes.
    fingerprint: str
    covers_content: bool = True


def load_images(
    name: str,
    root: str | Path | None = None,
    *,
    holdout: float | Literal["auto"] = 0.1,
    holdout_seed: int = 0,
    train_size: int | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> ImageDataset:
    """An image data set with its training split divided into training and validation.

    ``name`` is one of ``BUILT_IN`` and ``ON_DISK``, or ``package.module:function``, which is called
    with ``root`` and ``arguments`` and returns an :class:`ImageSource`.

    ``holdout`` is the share of the training split that becomes the validation split, in [0, 1).
    Class folders that come with a validation split keep theirs. Class folders without any splits
    are divided class by class: this share for validation, and as much for testing. "auto" holds out
    about 200 images, but at least a tenth and at most a quarter of them. ``holdout_seed`` says
    which samples these are, and which ``train_size`` images of those that are left are trained on.

    Raises:
        DataError: the data is missing, damaged or something else than ``name``.
    """

    def load() -> tuple[ImageSource, str, bool]:
        source = _source(name, root, arguments or {})
        return source, *_fingerprint(source)

    try:
        # A million files are listed by one process only.
        source, fingerprint, covers_content = once(load) if name == "folder" else load()
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error
    if not len(source.train) or (source.test is not None and not len(source.test)):
        raise DataError(f"{root}: no samples in the training or the test split of {name}")
    automatic = min(max(_HELD_OUT / len(source.train), 0.1), 0.25)
    share = automatic if holdout == "auto" else holdout
    train, valid, test = source.train, source.valid, source.test
    if test is None:
        train, valid, test = _divide(source, share, holdout_seed, root)
    elif valid is None:
        train, valid = _hold_out(train, share, holdout_seed)
    if train_size is not None:
        if train_size > len(train):
            raise DataError(
                f"data.train_size: {train_size}, but {name} has {len(train)} images to train on"
            )
        order = permutation(holdout_seed, 0, len(train), stream="train_size")
        train = train.select(order[:train_size].sort().values)
    facts = source.classes, source.mean, source.std
    return ImageDataset(train, valid, test, *facts, fingerprint, covers_content)


def _source(name: str, root: str | Path | None, arguments: Mapping[str, Any]) -> ImageSource:
    if is_reference(name):
        given = {"root": None if root is None else Path(root).expanduser()}
        return _checked(call_function("data.name", name, given, arguments), name)
    if name in BUILT_IN:
        if root is not None:
            raise DataError(
                f"{name} is built in and takes no data.root: for the images in {root} set "
                f"data.name to one of {', '.join(ON_DISK)}"
            )
        return BUILT_IN[name]()
    if name not in ON_DISK:
        raise DataError(unknown_name("data set", name, [*BUILT_IN, *ON_DISK]))
    if root is None:
        raise DataError(f"{name} is not built in: data.root must name the folder that holds it")
    folder = Path(root).expanduser()
    if not folder.exists():
        raise DataError(
            f"{folder}: no such folder; data.root must name the folder that holds {name}"
        )
    return ON_DISK[name](folder)


def _hold_out(split: ImageSplit, share: float, seed: int) -> tuple[ImageSplit, ImageSplit]:
    """Divide a split at random; both parts keep the order of the samples."""
    order = permutation(seed, 0, len(split), stream="holdout")
    size = min(round(share * len(split)), len(split) - 1)
    held, kept = order[:size].sort().values, order[size:].sort().values
    return split.select(kept), split.select(held)


def _divide(
    source: ImageSource, share: float, seed: int, root: str | Path | None
) -> tuple[ImageSplit, ImageSplit, ImageSplit]:
    """Training, validation and test split of a data set without any, each with every class."""
    if share == 0 or share >= 0.5:
        raise DataError(
            f"data.holdout: {share}, but {root} has no splits: the share for validation, and for "
            "testing, must lie between 0 and 0.5"
        )
    parts: list[list[Tensor]] = [[], [], []]
    for label, name in enumerate(source.classes):
        mine = (source.train.labels == label).nonzero().flatten()
        if len(mine) < 3:
            raise DataError(f"{root}: class {name} has {len(mine)} images; three splits need 3")
        order = mine[permutation(seed, label, len(mine), stream="divide")]
        size = min(max(1, round(share * len(mine))), (len(mine) - 1) // 2)
        parts[0].append(order[2 * size :])
        parts[1].append(order[:size])
        parts[2].append(order[size : 2 * size])
    train, valid, test = (source.train.select(torch.cat(part).sort().values) for part in parts)
    return train, valid, test


def _checked(source: object, where: str) -> ImageSource:
    """What a function of the user returned, if it is a data set whose parts fit together."""
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
    elif not isinstance(images, FolderImages):
        raise DataError(
            f"{where}: images must be a uint8 tensor (N, C, H, W) or FolderImages, not "
            f"{_described(images)}"
        )
    if len(images) != len(labels):
        raise DataError(f"{where}: {len(images)} images, but {len(labels)} labels")
    check_labels(labels, len(source.classes), where)


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def _fingerprint(source: ImageSource) -> tuple[str, bool]:
    """SHA-256 over the published splits, and whether it covers the content of all files."""
    splits = [split for split in (source.train, source.valid, source.test) if split is not None]
    in_files = [split.images for split in splits if isinstance(split.images, FolderImages)]
    covers_content = sum(sum(images.sizes()) for images in in_files) <= HASHED_BYTES
    digest = hashlib.sha256()
    for split in splits:
        images = split.images
        if isinstance(images, Tensor):
            digest.update(repr(tuple(images.shape)).encode())
            digest.update(images.contiguous().numpy().data)
        else:
            sizes = dict(zip(images.names, images.sizes(), strict=True))
            facts = images.digests() if covers_content else sizes
            for name in images.names:
                digest.update(f"{name} {facts[name]}\n".encode("utf-8", "surrogateescape"))
        digest.update(split.labels.numpy().data)
    return digest.hexdigest(), covers_content
