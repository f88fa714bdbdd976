"""Folders of JPEG and PNG files, one per class, the usual layout of ImageNet."""

from __future__ import annotations

import importlib.util
import os
import stat
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import DataError
from ..run import checksums
from ..run.files import open_regular
from .splits import IMAGENET_MEAN, IMAGENET_STD, ImageSource, ImageSplit

__all__ = ["SUFFIXES", "FolderImages", "decode_image", "load_folders"]

SUFFIXES = (".jpg", ".jpeg", ".png")
_MOST_PIXELS = 1 << 26  # of an image; a file of a few kilobytes can have many more


def decode_image(path: Path, channels: int = 3) -> Tensor:
    """The pixels of an image file, (channels, H, W) uint8: grey (1 channel) or RGB (3).

    Raises:
        DataError: it cannot be read as an image.
    """
    from PIL import Image, UnidentifiedImageError

    warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # refused below
    try:
        with open_regular(path) as content, Image.open(content) as file:
            if file.width * file.height > _MOST_PIXELS:
                raise DataError(
                    f"{path}: it has {file.width * file.height} pixels, and {_MOST_PIXELS} are the "
                    "most that are read"
                )
            image = file.convert("L" if channels == 1 else "RGB")
    except UnidentifiedImageError as error:
        raise DataError(f"{path}: not a readable image") from error
    # Pillow reports damage as any of these, a broken PNG as SyntaxError.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: not a readable image ({reason})") from error
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, channels).permute(2, 0, 1).contiguous()


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
        return decode_image(self.root / self.names[index])

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
        if entry.name.lower().endswith(SUFFIXES) and entry.name[0] != "."
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
            raise DataError(f"{folder / kind}: no image in it ({', '.join(SUFFIXES)})")
        names += [f"{kind}/{file}" for file in files]
        labels += [classes.index(kind)] * len(files)
    return ImageSplit(FolderImages(folder, tuple(names)), torch.tensor(labels))


def load_folders(root: Path) -> ImageSource:
    """Class folders under ``root/train`` and ``root/val`` or ``root/test``, or all under ``root``.

    If both ``val`` and ``test`` have class folders, ``val`` is the validation split. A ``test``
    without class folders, such as that of ImageNet, which has no labels, is ignored.
    """
    if importlib.util.find_spec("PIL") is None:
        raise DataError("decoding image files needs Pillow: pip install pillow")
    classes = _class_folders(root / "train")
    if (
        not classes
        and (plain := _class_folders(root))
        and all(_image_files(root / name) for name in plain)
    ):
        return ImageSource(
            train=_split(root, plain),
            test=None,
            classes=tuple(plain),
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
        )
    if not classes:
        raise DataError(f"{root / 'train'}: no class folders; images belong in train/<class>/")
    train = _split(root / "train", classes)
    held = [_split(root / part, classes) for part in ("val", "test") if _class_folders(root / part)]
    if not held:
        raise DataError(f"{root}: neither val/<class>/ nor test/<class>/ beside train/")
    return ImageSource(
        train=train,
        test=held[-1],
        classes=tuple(classes),
        valid=held[0] if len(held) == 2 else None,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )
