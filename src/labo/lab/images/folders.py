"""Folders of JPEG and PNG files, one per class, the usual layout of ImageNet."""

from __future__ import annotations

import importlib.util
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import DataError
from ..run import checksums
from .splits import ImageSplit, Source

__all__ = ["FolderImages", "load_folders"]

_SUFFIXES = (".jpg", ".jpeg", ".png")
_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class FolderImages:
    """Image files, decoded when they are indexed.

    ``images[i]`` is (3, H, W) uint8, each image of its own size.

    Attributes:
        root: the folder of the split.
        names: the files, relative to it.
    """

    root: Path
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Tensor:
        from PIL import Image

        path = self.root / self.names[index]
        try:
            with Image.open(path) as file:
                image = file.convert("RGB")
        # Pillow reports damage as any of these, a broken PNG as SyntaxError.
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise DataError(f"{path}: not a readable image ({error})") from error
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return pixels.view(image.height, image.width, 3).permute(2, 0, 1).contiguous()

    def select(self, index: Tensor) -> FolderImages:
        """The images with these indices, (M,) int64."""
        return FolderImages(self.root, tuple(self.names[i] for i in index.tolist()))

    def sizes(self) -> list[int]:
        """The sizes of the files in bytes."""
        return [os.stat(self.root / name).st_size for name in self.names]

    def digests(self) -> dict[str, str]:
        """name -> SHA-256 of the file; computed once per file and remembered."""
        return checksums.digests(self.root, self.names)


def _class_folders(folder: Path) -> list[str]:
    """The names of the class folders, sorted."""
    if not folder.is_dir():
        return []
    return sorted(
        entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != "."
    )


def _image_files(folder: Path) -> list[str]:
    found = [
        entry
        for entry in os.scandir(folder)
        if entry.name.lower().endswith(_SUFFIXES) and entry.name[0] != "."
    ]
    for entry in found:
        if not stat.S_ISREG(entry.stat().st_mode):  # opening a pipe would wait forever
            raise DataError(f"{folder / entry.name}: not a regular file")
    return sorted(entry.name for entry in found)


def _split(folder: Path, classes: list[str]) -> ImageSplit:
    """The images of a split, class after class."""
    names: list[str] = []
    labels: list[int] = []
    for kind in _class_folders(folder):
        if kind not in classes:
            raise DataError(f"{folder / kind}: a class that is not among the training classes")
        files = _image_files(folder / kind)
        if not files:
            raise DataError(f"{folder / kind}: no image in it ({', '.join(_SUFFIXES)})")
        names += [f"{kind}/{file}" for file in files]
        labels += [classes.index(kind)] * len(files)
    return ImageSplit(FolderImages(folder, tuple(names)), torch.tensor(labels))


def load_folders(root: Path) -> Source:
    """Class folders under ``root/train`` and ``root/val`` or ``root/test``.

    If both ``val`` and ``test`` have class folders, ``val`` is the validation split. A ``test``
    without class folders, such as that of ImageNet, which has no labels, is ignored.
    """
    if importlib.util.find_spec("PIL") is None:
        raise DataError("decoding image files needs Pillow: pip install pillow")
    classes = _class_folders(root / "train")
    if not classes:
        raise DataError(f"{root / 'train'}: no class folders; images belong in train/<class>/")
    train = _split(root / "train", classes)
    held = [_split(root / part, classes) for part in ("val", "test") if _class_folders(root / part)]
    if not held:
        raise DataError(f"{root}: neither val/<class>/ nor test/<class>/ beside train/")
    return Source(
        train=train,
        test=held[-1],
        classes=tuple(classes),
        valid=held[0] if len(held) == 2 else None,
        mean=_IMAGENET_MEAN,
        std=_IMAGENET_STD,
    )
