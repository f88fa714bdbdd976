"""tools/pack_cifar.py writes what the recipes for CIFAR-10 read."""

from __future__ import annotations

import lzma
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from tools import pack_cifar

from labo.lab.images.cifar import load_cifar
from labo.lab.images.sources import load_images


@pytest.fixture
def images(tmp_path):
    """Two images of every class and split, each with a colour of its own."""
    for offset, split in enumerate(("train", "test")):
        for label, name in enumerate(pack_cifar.CLASSES):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for number in range(2):
                color = (10 * label + number, 100 + 50 * offset, 200)
                Image.new("RGB", (32, 32), color).save(folder / f"{number}.png")
    return tmp_path / "images"


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["pack_cifar.py", *map(str, arguments)])
    pack_cifar.main()


def test_every_image_is_packed_with_its_label(images, tmp_path, monkeypatch):
    run(monkeypatch, images, tmp_path / "out")
    data = load_images("cifar10", str(tmp_path / "out"), holdout=0.1)
    assert list(data.classes) == list(pack_cifar.CLASSES)
    for split, count, green in ((data.train, 18, 100), (data.valid, 2, 100), (data.test, 20, 150)):
        assert len(split.labels) == count
        colors = torch.as_tensor(split.images)[:, :, 5, 7]
        assert torch.equal(colors[:, 0] // 10, split.labels.to(torch.uint8))
        assert (colors[:, 1] == green).all()
        assert (colors[:, 2] == 200).all()
    assert not torch.equal(data.test.labels, data.test.labels.sort().values)


def test_copies_of_a_subset_keep_its_order(images, tmp_path, monkeypatch):
    subset = tmp_path / "subset"
    subset.mkdir()
    # Nearest to the second image of class 3 and the first of class 1.
    for split, file in (("train", "data_batch_1.bin"), ("test", "test_batch.bin")):
        green = 100 if split == "train" else 150
        wanted = np.zeros((2, 3073), np.uint8)
        for row, (label, red) in enumerate(((3, 33), (1, 10))):
            wanted[row] = np.append(label, np.repeat([red, green, 190], 1024))
        (subset / f"{file}.xz").write_bytes(lzma.compress(wanted.tobytes()))
    run(monkeypatch, images, tmp_path / "out", "--like", subset)
    copies = load_cifar("cifar10", tmp_path / "out")
    found = pack_cifar.stored(copies.train)
    assert found[:, 0].tolist() == [3, 1]
    assert found[:, 1].tolist() == [31, 10]
    assert found[:, 2049].tolist() == [200, 200]
    assert copies.test.labels.tolist() == [3, 1]
