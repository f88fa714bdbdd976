"""MNIST and Fashion-MNIST in their idx files."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import torch
from torch import Tensor

from ..compressed import read_files
from ..errors import DataError
from .splits import ImageSource, check_labels

_FOLDERS = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST"}
_CLASSES = {
    "mnist": tuple("0123456789"),
    "fashion-mnist": (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
}


def _parse(data: bytes, path: Path, dims: int) -> Tensor:
    """The array of bytes in an idx file: a magic number, ``dims`` sizes, then the bytes."""
    magic = bytes((0, 0, 8, dims))  # 8 is the code of unsigned bytes
    header = struct.calcsize(f">4s{dims}I")
    if data[:4] != magic:
        raise DataError(
            f"{path}: magic number 0x{data[:4].hex()}, but an idx{dims}-ubyte file has "
            f"0x{magic.hex()}"
        )
    if len(data) < header:
        raise DataError(f"{path}: truncated, only {len(data)} bytes")
    shape = struct.unpack_from(f">{dims}I", data, 4)
    if len(data) - header != math.prod(shape):
        raise DataError(
            f"{path}: truncated or damaged, {len(data) - header} bytes of data where its header "
            f"says {' x '.join(map(str, shape))}"
        )
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)[header:].view(shape)


def _read_split(files: dict[str, bytes], folder: Path, prefix: str) -> tuple[Tensor, Tensor]:
    """Images (N, 1, 28, 28) and labels (N,)."""
    images_name, labels_name = f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"
    images = _parse(files[images_name], folder / images_name, 3).unsqueeze(1)
    labels = _parse(files[labels_name], folder / labels_name, 1).long()
    if len(images) != len(labels):
        raise DataError(f"{folder}: {len(images)} images but {len(labels)} labels in {prefix}-*")
    check_labels(labels, 10, folder / labels_name)
    return images, labels


def _read(folder: Path, names: list[str]) -> dict[str, bytes]:
    """The idx files of a folder; in some copies the second hyphen is a dot."""
    dotted = {name.replace("-idx", ".idx"): name for name in names}
    files = read_files(folder, [*names, *dotted])
    return {dotted.get(name, name): data for name, data in files.items()}


def load_idx(name: str, root: Path) -> ImageSource:
    """MNIST or Fashion-MNIST from ``root`` or the folders that torchvision makes in it."""
    names = [
        f"{prefix}-{part}-ubyte"
        for prefix in ("train", "t10k")
        for part in ("images-idx3", "labels-idx1")
    ]
    own = root / _FOLDERS[name]
    for folder in (root, root / "raw", own / "raw", own):
        files = _read(folder, names)
        if files:
            break
    else:
        raise DataError(f"{root}: no {name} here; it should hold {names[0]} (or .gz) and the like")
    missing = [each for each in names if each not in files]
    if missing:
        raise DataError(f"{folder}: no {missing[0]} (or .gz), which {name} needs")
    train, test = (_read_split(files, folder, prefix) for prefix in ("train", "t10k"))
    return ImageSource.of(train, test, classes=_CLASSES[name])
