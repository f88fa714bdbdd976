"""Packs folders of CIFAR-10 images as the binary version of the data set.

    python tools/pack_cifar.py IMAGES OUT                  # IMAGES/train/cat/0001.jpg, ...
    python tools/pack_cifar.py IMAGES OUT --like SUBSET    # only copies of the images in SUBSET

Writes OUT/data_batch_N.bin and OUT/test_batch.bin, in random order, and the names of the classes.
With ``--like``, SUBSET holds the original images in any form that the recipes read, and each is
replaced by the nearest image of its class in IMAGES: what compression costs can then be measured on
the same images. docs/results.md uses both.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from labo.lab.images.cifar import load_cifar
from labo.lab.images.splits import ImageSplit

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BATCH = 10_000  # records of a file

Records = NDArray[np.uint8]  # (N, 1 + 3 * 32 * 32): the label, then the pixels of three channels


def packed(folder: Path) -> Records:
    """The images below CLASS/ in a folder, in a fixed random order."""
    records = []
    for label, name in enumerate(CLASSES):
        for file in sorted((folder / name).iterdir()):
            pixels = np.asarray(Image.open(file).convert("RGB")).transpose(2, 0, 1)
            records.append(np.append(label, pixels).astype(np.uint8))
    random.Random(0).shuffle(records)
    return np.stack(records)


def stored(split: ImageSplit) -> Records:
    """The records of a split that was read."""
    assert isinstance(split.images, Tensor)
    return np.column_stack([split.labels.to(torch.uint8), split.images.flatten(1)])


def nearest(wanted: Records, records: Records) -> Records:
    """For each wanted record the nearest one of its class."""
    found = np.empty_like(wanted)
    for label in np.unique(wanted[:, 0]):
        rows = np.flatnonzero(wanted[:, 0] == label)
        choice = records[records[:, 0] == label]
        a, b = wanted[rows, 1:].astype(np.float32), choice[:, 1:].astype(np.float32)
        distances = (a * a).sum(1)[:, None] + (b * b).sum(1) - 2 * a @ b.T
        found[rows] = choice[distances.argmin(1)]
    return found


def write(records: Records, out: Path, split: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    if split == "test":
        (out / "test_batch.bin").write_bytes(records.tobytes())
        return
    for number, first in enumerate(range(0, len(records), BATCH), start=1):
        (out / f"data_batch_{number}.bin").write_bytes(records[first : first + BATCH].tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description="Pack folders of images as CIFAR-10.")
    parser.add_argument("images", type=Path, help="holds train/CLASS/ and test/CLASS/")
    parser.add_argument("out", type=Path, help="folder for the binary version")
    parser.add_argument("--like", type=Path, metavar="SUBSET", help="keep copies of these only")
    options = parser.parse_args()
    like = None if options.like is None else load_cifar("cifar10", options.like)
    for split in ("train", "test"):
        records = packed(options.images / split)
        if like is not None:
            records = nearest(stored(getattr(like, split)), records)
        write(records, options.out, split)
    (options.out / "batches.meta.txt").write_text("\n".join(CLASSES) + "\n")


if __name__ == "__main__":
    main()
