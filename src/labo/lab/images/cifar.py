"""CIFAR-10 and CIFAR-100: binary and python versions, unpacked or as the published archives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor

from ..compressed import read_files
from ..errors import DataError
from .pickles import ByteArray, read_pickle
from .splits import ImageSource, check_labels

_PIXELS = 3 * 32 * 32
_Samples = tuple[Tensor, Tensor]  # images (N, 3, 32, 32) uint8, labels (N,) int64


def _parse_binary(data: bytes, path: Path, label_bytes: int) -> _Samples:
    """Records of labels, the last of which is the class, and pixels."""
    record = label_bytes + _PIXELS
    if not data or len(data) % record:
        raise DataError(
            f"{path}: {len(data)} bytes are not a whole number of {record}-byte records: "
            "truncated, or another format"
        )
    records = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, record)
    images = records[:, label_bytes:].reshape(-1, 3, 32, 32)
    return images, records[:, label_bytes - 1].long()


def _is_list_of_bytes(labels: object) -> TypeGuard[list[int]]:
    return isinstance(labels, list) and all(
        type(label) is int and 0 <= label < 256 for label in labels
    )


def _parse_pickle(data: bytes, path: Path, labels_key: str) -> _Samples:
    """A dict of an array of pixels, one image per row, and a list of labels."""
    content = read_pickle(data, path)
    array, labels = content.get("data"), content.get(labels_key)
    if not isinstance(array, ByteArray) or not _is_list_of_bytes(labels):
        raise DataError(f"{path}: another pickle; a CIFAR batch has 'data' and {labels_key!r}")
    shape = (len(labels), _PIXELS)
    try:
        images = array.to_tensor(shape).reshape(-1, 3, 32, 32)
    except ValueError as error:
        raise DataError(f"{path}: {error}; its labels need bytes of shape {shape}") from error
    return images, torch.tensor(labels, dtype=torch.int64)


def _names_in_text(data: bytes, path: Path) -> list[str]:
    return data.decode("latin1").split()


def _names_in_pickle(data: bytes, path: Path, key: str) -> list[str]:
    names = read_pickle(data, path).get(key)
    if not isinstance(names, list) or not all(isinstance(name, str | bytes) for name in names):
        return []
    return [name.decode("latin1") if isinstance(name, bytes) else name for name in names]


@dataclass(frozen=True)
class _Version:
    """One of the two forms in which a set is published: its places, its files, their readers."""

    folder: str
    archive: str
    train: tuple[str, ...]
    test: str
    names: str
    read: Callable[[bytes, Path], _Samples]
    read_names: Callable[[bytes, Path], list[str]]

    def files(self) -> tuple[str, ...]:
        return (*self.train, self.test, self.names)

    def missing(self, files: dict[str, bytes]) -> list[str]:
        """The files that are missing. The first training file alone is a valid sample set."""
        whole = any(name in files for name in self.train[1:])
        needed = (*(self.train if whole else self.train[:1]), self.test)
        return [name for name in needed if name not in files]


@dataclass(frozen=True)
class _DataSet:
    """A set in its binary and its python version; mean and std of its 50,000 training images."""

    title: str
    num_classes: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    versions: tuple[_Version, _Version]


_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
_DATA_SETS = {
    "cifar10": _DataSet(
        title="CIFAR-10",
        num_classes=10,
        mean=(0.49139968, 0.48215841, 0.44653091),
        std=(0.24703223, 0.24348513, 0.26158784),
        versions=(
            _Version(
                folder="cifar-10-batches-bin",
                archive="cifar-10-binary.tar.gz",
                train=tuple(f"{batch}.bin" for batch in _BATCHES),
                test="test_batch.bin",
                names="batches.meta.txt",
                read=partial(_parse_binary, label_bytes=1),
                read_names=_names_in_text,
            ),
            _Version(
                folder="cifar-10-batches-py",
                archive="cifar-10-python.tar.gz",
                train=_BATCHES,
                test="test_batch",
                names="batches.meta",
                read=partial(_parse_pickle, labels_key="labels"),
                read_names=partial(_names_in_pickle, key="label_names"),
            ),
        ),
    ),
    "cifar100": _DataSet(
        title="CIFAR-100",
        num_classes=100,
        mean=(0.50707516, 0.48654887, 0.44091784),
        std=(0.26733429, 0.25643846, 0.27615047),
        versions=(
            _Version(
                folder="cifar-100-binary",
                archive="cifar-100-binary.tar.gz",
                train=("train.bin",),
                test="test.bin",
                names="fine_label_names.txt",
                read=partial(_parse_binary, label_bytes=2),
                read_names=_names_in_text,
            ),
            _Version(
                folder="cifar-100-python",
                archive="cifar-100-python.tar.gz",
                train=("train",),
                test="test",
                names="meta",
                read=partial(_parse_pickle, labels_key="fine_labels"),
                read_names=partial(_names_in_pickle, key="fine_label_names"),
            ),
        ),
    ),
}


def _find(data_set: _DataSet, root: Path) -> tuple[_Version, Path, dict[str, bytes]]:
    """The version that is at ``root``, its folder or archive, and its files."""
    for version in data_set.versions:
        for path in (root, root / version.folder, root / version.archive):
            files = read_files(path, version.files())
            if any(name in files for name in (*version.train, version.test)):
                return version, path, files
    likely = " or ".join(f"{version.folder}, {version.archive}" for version in data_set.versions)
    raise DataError(f"{root}: no {data_set.title} here; it should hold {likely}, or their files")


def load_cifar(name: str, root: Path) -> ImageSource:
    """CIFAR-10 or CIFAR-100 from a folder that holds it, unpacked or not, or from its archive."""
    data_set = _DATA_SETS[name]
    version, path, files = _find(data_set, root)
    if missing := version.missing(files):
        raise DataError(f"{path}: no {missing[0]}, which {data_set.title} needs")

    def read(file: str) -> _Samples:
        images, labels = version.read(files[file], path / file)
        check_labels(labels, data_set.num_classes, path / file)
        return images, labels

    images, labels = zip(*(read(file) for file in version.train if file in files), strict=True)
    test = read(version.test)
    classes = [str(label) for label in range(data_set.num_classes)]  # if they have no names
    if version.names in files:
        where = path / version.names
        classes = version.read_names(files[version.names], where)
        if len(classes) != data_set.num_classes:
            raise DataError(
                f"{where}: {len(classes)} class names, but {data_set.title} has "
                f"{data_set.num_classes}"
            )
    train = torch.cat(images), torch.cat(labels)
    return ImageSource.of(train, test, classes=classes, mean=data_set.mean, std=data_set.std)
