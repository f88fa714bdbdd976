"""Folders of JPEG and PNG files, one per class, the usual layout of ImageNet."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import torch
from torch import Tensor

from ..errors import DataError
from .image_files import FolderImages
from .splits import ImageSource

SUFFIXES = (".jpg", ".jpeg", ".png")


def _class_folders(folder: Path) -> list[str]:
    """The names of the class folders, sorted."""
    if not folder.is_dir():
        return []
    return sorted(
        entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != "."
    )


def _images_in(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return [e for e in entries if e.name.lower().endswith(SUFFIXES) and e.name[0] != "."]


def _split(folder: Path, classes: list[str]) -> tuple[FolderImages, Tensor]:
    """The images of a split, class after class; each file is looked at once."""
    files: list[tuple[str, int]] = []
    labels: list[int] = []
    for kind in _class_folders(folder):
        if kind not in classes:
            raise DataError(f"{folder / kind}: a class that is not among the training classes")
        entries = sorted(_images_in(folder / kind), key=lambda entry: entry.name)
        if not entries:
            raise DataError(f"{folder / kind}: no image in it ({', '.join(SUFFIXES)})")
        for entry in entries:
            status = entry.stat()
            if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait forever
                raise DataError(f"{entry.path}: not a regular file")
            files.append((f"{kind}/{entry.name}", status.st_size))
        labels += [classes.index(kind)] * len(entries)
    names, sizes = zip(*files, strict=True)
    return FolderImages(folder, names, sizes), torch.tensor(labels)


def load_folders(root: Path) -> ImageSource:
    """Class folders under ``root/train`` and ``root/val`` or ``root/test``, or all under ``root``.

    If both ``val`` and ``test`` have class folders, ``val`` is the validation split. A ``test``
    without class folders, such as that of ImageNet, which has no labels, is ignored.
    """
    classes, plain = _class_folders(root / "train"), _class_folders(root)
    if not classes and plain and all(_images_in(root / name) for name in plain):
        return ImageSource.of(_split(root, plain), classes=plain)
    if not classes:
        raise DataError(f"{root / 'train'}: no class folders; images belong in train/<class>/")
    train = _split(root / "train", classes)
    held = [_split(root / part, classes) for part in ("val", "test") if _class_folders(root / part)]
    if not held:
        raise DataError(f"{root}: neither val/<class>/ nor test/<class>/ beside train/")
    valid = held[0] if len(held) == 2 else None
    return ImageSource.of(train, held[-1], valid, classes=classes)
