"""Image data: every format people have, read alike; and every way it can be wrong, in one line."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import pickle
import random
import re
import struct
import tarfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn import datasets

from idx_files import idx
from labo.lab import compressed as compressed_files
from labo.lab.analysis.reading import RecordLine
from labo.lab.errors import DataError, RequestError
from labo.lab.images import sources, task
from labo.lab.images.digits import read_digits
from labo.lab.images.sources import ImageDataset, ImageSplit, load_images
from labo.lab.recipes import load_recipe
from labo.lab.run import checksums

PIXELS = 3072


@contextmanager
def refused(message: str):
    """The data is refused, in one line that matches."""
    with pytest.raises(DataError, match=message) as caught:
        yield
    assert "\n" not in str(caught.value)


def samples(n: int, num_classes: int, seed: int) -> tuple[np.ndarray, list[int]]:
    """Pixels (n, 3072) and labels."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, PIXELS), dtype=np.uint8), rng.integers(
        num_classes, size=n
    ).tolist()


# CIFAR ------------------------------------------------------------------------------------------

TEN = {f"data_batch_{i}": samples(8, 10, i) for i in range(1, 6)} | {
    "test_batch": samples(6, 10, 9)
}
HUNDRED = {"train": samples(20, 100, 1), "test": samples(6, 100, 2)}
TEN_NAMES = [f"animal_{i}" for i in range(10)]
HUNDRED_NAMES = [f"thing_{i}" for i in range(100)]


TEN_LABELS = [label for i in range(1, 6) for label in TEN[f"data_batch_{i}"][1]]


def binary(batches: dict[str, tuple], before: bytes, names: dict[str, bytes]) -> dict[str, bytes]:
    """Records of labels and pixels; ``before`` is what is before the label."""
    return names | {
        f"{name}.bin": b"".join(
            before + bytes([y]) + x.tobytes() for x, y in zip(*batch, strict=True)
        )
        for name, batch in batches.items()
    }


def binary_cifar10() -> dict[str, bytes]:
    return binary(TEN, b"", {"batches.meta.txt": ("\n".join(TEN_NAMES) + "\n\n").encode()})


def binary_cifar100() -> dict[str, bytes]:
    return binary(HUNDRED, b"\x07", {"fine_label_names.txt": "\n".join(HUNDRED_NAMES).encode()})


def python2_string(value: bytes) -> bytes:
    return b"T" + struct.pack("<I", len(value)) + value


def python2_batch(pixels: np.ndarray, labels: list[int], labels_key: str) -> bytes:
    """A batch opcode by opcode as Python 2 and an old numpy wrote it: byte strings throughout."""
    array = b"".join(
        [
            b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R",
            b"(K\x01" + struct.pack("<cHcH", b"M", pixels.shape[0], b"M", PIXELS) + b"\x86",
            b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb",
            b"\x89" + python2_string(pixels.tobytes()) + b"tb",
        ]
    )
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"".join(
        [
            b"\x80\x02}(",
            python2_string(b"batch_label") + python2_string(b"training batch 1 of 5"),
            python2_string(labels_key.encode()) + numbers,
            python2_string(b"data") + array,
            b"u.",
        ]
    )


def python2_cifar10() -> dict[str, bytes]:
    files = {name: python2_batch(*batch, "labels") for name, batch in TEN.items()}
    names = b"](" + b"".join(python2_string(name.encode()) for name in TEN_NAMES) + b"e"
    return files | {"batches.meta": b"\x80\x02}" + python2_string(b"label_names") + names + b"s."}


def python3_cifar10(protocol: int, order: str = "C") -> dict[str, bytes]:
    files = {
        name: pickle.dumps({"data": np.asarray(x, order=order), "labels": y}, protocol)
        for name, (x, y) in TEN.items()
    }
    return files | {"batches.meta": pickle.dumps({b"label_names": TEN_NAMES}, protocol)}


def old_numpy_names(files: dict[str, bytes]) -> dict[str, bytes]:
    """As numpy 1 wrote them."""
    return {k: v.replace(b"numpy._core", b"numpy.core") for k, v in files.items()}


def python_cifar100() -> dict[str, bytes]:
    files = {name: python2_batch(*batch, "fine_labels") for name, batch in HUNDRED.items()}
    return files | {"meta": pickle.dumps({"fine_label_names": HUNDRED_NAMES}, 2)}


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def write_tar(path: Path, files: dict[str, bytes], prefix: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(f"{prefix}/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def compressed(files: dict[str, bytes], compress: Callable, suffix: str) -> dict[str, bytes]:
    return {f"{name}{suffix}": compress(data) for name, data in files.items()}


CIFAR10_FORMS = {
    "binary in its folder": ("cifar-10-batches-bin", binary_cifar10()),
    "binary xz": ("", compressed(binary_cifar10(), lzma.compress, ".xz")),
    "binary archive": ("cifar-10-binary.tar.gz", binary_cifar10()),
    "python in its folder": ("cifar-10-batches-py", python2_cifar10()),
    "python archive": ("cifar-10-python.tar.gz", python2_cifar10()),
    "protocol 4": ("", python3_cifar10(4)),
    "protocol 5": ("", python3_cifar10(5)),
    "protocol 2 of numpy 1": ("", old_numpy_names(python3_cifar10(2))),
    "fortran order, protocol 5": ("", python3_cifar10(5, "F")),
}
CIFAR100_FORMS = {
    "binary archive": ("cifar-100-binary.tar.gz", binary_cifar100()),
    "python in its folder": ("cifar-100-python", python_cifar100()),
}


def written(root: Path, place: str, files: dict[str, bytes]) -> Path:
    """``root`` with the files in a folder or an archive."""
    if place.endswith(".gz"):
        write_tar(root / place, files, "any")
    else:
        write(root / place, files)
    return root


def whole_train(data: ImageDataset, labels: list[int]) -> None:
    """Nothing of the training split is lost by holding out."""
    assert len(data.train) + len(data.valid) == len(labels)
    both = torch.cat([data.train.labels, data.valid.labels])
    assert sorted(both.tolist()) == sorted(labels)


@pytest.mark.parametrize("form", CIFAR10_FORMS)
def test_cifar10_in_every_form(tmp_path, form):
    data = load_images("cifar10", written(tmp_path, *CIFAR10_FORMS[form]), holdout=0)
    pixels = np.concatenate([TEN[f"data_batch_{i}"][0] for i in range(1, 6)])
    assert data.train.images.shape == (40, 3, 32, 32)
    assert data.train.images.dtype == torch.uint8
    assert data.train.labels.dtype == torch.int64
    assert (data.train.images.reshape(40, -1).numpy() == pixels).all()
    assert data.train.labels.tolist() == TEN_LABELS
    assert (data.test.images.reshape(6, -1).numpy() == TEN["test_batch"][0]).all()
    assert data.test.labels.tolist() == TEN["test_batch"][1]
    assert len(data.valid) == 0
    assert list(data.classes) == TEN_NAMES
    assert data.mean == (0.49139968, 0.48215841, 0.44653091)
    assert data.std == (0.24703223, 0.24348513, 0.26158784)
    again = load_images("cifar10", write(tmp_path / "other", binary_cifar10()))
    assert data.fingerprint == again.fingerprint


@pytest.mark.parametrize("form", CIFAR100_FORMS)
def test_cifar100_in_every_form(tmp_path, form):
    data = load_images("cifar100", written(tmp_path, *CIFAR100_FORMS[form]), holdout=0)
    assert (data.train.images.reshape(20, -1).numpy() == HUNDRED["train"][0]).all()
    assert data.train.labels.tolist() == HUNDRED["train"][1]
    assert data.test.labels.tolist() == HUNDRED["test"][1]
    assert list(data.classes) == HUNDRED_NAMES
    assert data.mean == (0.50707516, 0.48654887, 0.44091784)
    assert data.std == (0.26733429, 0.25643846, 0.27615047)


def test_one_batch_alone_is_a_sample(tmp_path):
    files = binary_cifar10()
    sample = {name: files[name] for name in ("data_batch_1.bin", "test_batch.bin")}
    data = load_images("cifar10", write(tmp_path, sample), holdout=0.25)
    assert (len(data.train), len(data.valid), len(data.test)) == (6, 2, 6)
    assert data.classes == tuple("0123456789")


def edited(files: dict[str, bytes], changes: dict[str, bytes | None]) -> dict[str, bytes]:
    """The files, some of them replaced or (None) removed."""
    return {name: data for name, data in (files | changes).items() if data is not None}


def nested(depth: int) -> bytes:
    """A tuple of two tuples of two tuples ...: 2^depth leaves in a few bytes of pickle."""
    return b"\x80\x02N" + b"".join(b"q\x01h\x01\x86" for _ in range(depth))


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_malicious_pickle_is_refused_unexecuted(tmp_path, protocol):
    trap = tmp_path / "executed"
    batch = pickle.dumps({"data": Evil(trap), "labels": [1]}, protocol)
    root = write(tmp_path / "data", edited(python2_cifar10(), {"data_batch_3": batch}))
    with refused(r"data_batch_3: refused, .* asks for '(posix|nt).mkdir'"):
        load_images("cifar10", root)
    assert not trap.exists()
    pickle.loads(batch)
    assert trap.exists(), "the trap does not work"


def test_archive_members_go_nowhere(tmp_path):
    """A path that climbs out of the archive is only a name; a link in it is not followed."""
    home = tmp_path / "a" / "b"
    write_tar(home / "cifar-10-binary.tar.gz", binary_cifar10(), "../../climbed")
    data = load_images("cifar10", home)
    whole_train(data, TEN_LABELS)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "b", "cifar-10-binary.tar.gz"]
    with tarfile.open(home / "cifar-10-binary.tar.gz", "w:gz") as tar:
        for name in ("data_batch_1.bin", "test_batch.bin"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(link)
    with refused("no CIFAR-10 here"):
        load_images("cifar10", home)


FULL = binary_cifar10()["test_batch.bin"]
DAMAGED = "test_batch.bin: truncated or damaged compressed file"
WRONG_BINARY = {
    "missing batch": ({"data_batch_4.bin": None}, "no data_batch_4.bin, which CIFAR-10 needs"),
    "missing test": ({"test_batch.bin": None}, "no test_batch.bin"),
    "truncated": (
        {"test_batch.bin": FULL[:-1]},
        "test_batch.bin: 18437 bytes are not a whole number of 3073-byte records",
    ),
    "label": (
        {"test_batch.bin": FULL[:3073] + b"\x0a" + FULL[3074:]},
        r"test_batch.bin: label 10 of sample 1 is outside \[0, 10\)",
    ),
    "names": (
        {"batches.meta.txt": b"cat\ndog\n"},
        "batches.meta.txt: 2 class names, but CIFAR-10 has 10",
    ),
    "truncated gz": ({"test_batch.bin": gzip.compress(FULL)[:-20]}, DAMAGED),
    "damaged gz": ({"test_batch.bin": b"\x1f\x8b\x08" + bytes(50)}, DAMAGED),
}


@pytest.mark.parametrize("wrong", WRONG_BINARY)
def test_wrong_binary_cifar_is_refused(tmp_path, wrong):
    changes, message = WRONG_BINARY[wrong]
    with refused(message):
        load_images("cifar10", write(tmp_path, edited(binary_cifar10(), changes)))


def test_another_folder_says_what_it_should_hold(tmp_path):
    with refused("no CIFAR-10 here; it should hold cifar-10-batches-bin"):
        load_images("cifar10", write(tmp_path, binary_cifar100()))


REFUSED = "test_batch: refused, not a pickle of plain arrays"
OTHER = "test_batch: another pickle; a CIFAR batch has 'data' and 'labels'"
ZEROS = np.zeros((1, PIXELS), np.uint8)
WRONG_PICKLES = {
    "no pickle": (b"hello", REFUSED),
    "persistent id": (
        b"Pelsewhere\n.",
        f"{REFUSED} .it makes objects, sets or persistent",
    ),
    "truncated": (python2_cifar10()["test_batch"][:500], REFUSED),
    "list": (pickle.dumps([1]), "holds a list, not a dict"),
    "another name of numpy": (b"cnumpy\nload\n.", "it asks for 'numpy.load'"),
    "labels missing": (python2_batch(*samples(4, 10, 0), "fine_labels"), OTHER),
    "labels too few": (
        python2_batch(samples(4, 10, 0)[0], [1], "labels"),
        r"shape \(4, 3072\); its labels need bytes of shape \(1, 3072\)",
    ),
    "huge label": (pickle.dumps({"data": ZEROS, "labels": [2**70]}), OTHER),
    "floats": (
        pickle.dumps({"data": ZEROS.astype(float), "labels": [1]}, 2),
        "an array of type 'f8'",
    ),
    "bytes missing": (
        python2_cifar10()["test_batch"].replace(
            python2_string(TEN["test_batch"][0].tobytes()), b"U\x01x"
        ),
        "without its 18432 bytes",
    ),
    "encoding": (b"c_codecs\nencode\n(Va\nVrot13\ntR.", "refused, .*encoding 'rot13'"),
    # Those that would take all time or memory.
    "a key that takes forever to hash": (b"\x80\x02}" + nested(200)[2:] + b"Ns.", "test_batch: "),
    "a shape that takes forever to print": (
        b"\x80\x02}U\x04datacnumpy\nndarray\n)R(K\x01"
        + nested(200)[2:]
        + b"N\x89U\x00tbsU\x06labels]s.",
        "test_batch: ",
    ),
    "a place in memory far away": (b"\x80\x02}r\xff\xff\xff\x7f.", "test_batch: "),
    "a long integer": (b"\x80\x02}U\x06labelsL" + b"9" * 100_000 + b"L\ns.", "test_batch: "),
}


@pytest.mark.parametrize("wrong", WRONG_PICKLES)
def test_a_wrong_pickle_is_refused(tmp_path, wrong):
    batch, message = WRONG_PICKLES[wrong]
    with refused(message):
        load_images("cifar10", write(tmp_path, edited(python2_cifar10(), {"test_batch": batch})))


def test_damaged_archives_are_refused(tmp_path):
    archive = write_tar(tmp_path / "cifar-10-binary.tar.gz", binary_cifar10(), "x")
    whole = archive.read_bytes()
    for data in (whole[: len(whole) // 2], b"not an archive", b""):
        archive.write_bytes(data)
        with refused("cifar-10-binary.tar.gz: damaged, or not a tar archive"):
            load_images("cifar10", tmp_path)


def test_every_flipped_bit_of_an_archive_is_found(tmp_path):
    """Of the archive, not of the 10 bytes before the compressed data, which say nothing of it."""
    archive = write_tar(tmp_path / "cifar-10-binary.tar.gz", binary_cifar10(), "x")
    whole = archive.read_bytes()
    start = whole.index(b"\0", 10) + 1  # behind the name in the header
    chance = random.Random(0)
    for _ in range(100):
        data = bytearray(whole)
        data[chance.randrange(start, len(whole))] ^= 1 << chance.randrange(8)
        archive.write_bytes(data)
        with refused("cifar-10-binary.tar.gz: damaged, or not a tar archive"):
            load_images("cifar10", tmp_path)


def test_a_file_that_inflates_out_of_proportion_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(compressed_files, "_ALWAYS_ALLOWED", 1 << 20)
    bomb = gzip.compress(bytes(1 << 21))
    write(tmp_path, {"data_batch_1.bin.gz": bomb})
    with refused("inflates to more than 200 times its size; set LABO_MAX_INFLATION"):
        load_images("cifar10", tmp_path)
    monkeypatch.setenv("LABO_MAX_INFLATION", "5000")
    with refused("whole number of 3073-byte records|no test_batch"):
        load_images("cifar10", tmp_path)


# idx --------------------------------------------------------------------------------------------


RNG = np.random.default_rng(0)
IDX_ARRAYS = {
    "train-images-idx3-ubyte": RNG.integers(0, 256, (30, 28, 28), dtype=np.uint8),
    "train-labels-idx1-ubyte": RNG.integers(0, 10, 30).astype(np.uint8),
    "t10k-images-idx3-ubyte": RNG.integers(0, 256, (10, 28, 28), dtype=np.uint8),
    "t10k-labels-idx1-ubyte": RNG.integers(0, 10, 10).astype(np.uint8),
}
IDX = {name: idx(array) for name, array in IDX_ARRAYS.items()}
GZ = {f"{name}.gz": gzip.compress(data) for name, data in IDX.items()}

IDX_FORMS = {
    "plain": lambda root: write(root, IDX),
    "raw": lambda root: write(root / "raw", GZ).parent,
    "torchvision": lambda root: write(root / "FashionMNIST" / "raw", IDX).parent.parent,
    "dots": lambda root: write(root, {k.replace("-idx", ".idx"): v for k, v in IDX.items()}),
    "unpacked, yet called .gz": lambda root: write(root, {f"{k}.gz": v for k, v in IDX.items()}),
}


@pytest.mark.parametrize("form", IDX_FORMS)
def test_idx_in_every_form(tmp_path, form):
    data = load_images("fashion-mnist", IDX_FORMS[form](tmp_path), holdout=0)
    pixels = IDX_ARRAYS["train-images-idx3-ubyte"]
    assert data.train.images.shape == (30, 1, 28, 28)
    assert (data.train.images.squeeze(1).numpy() == pixels).all()
    assert data.train.labels.tolist() == IDX_ARRAYS["train-labels-idx1-ubyte"].tolist()
    assert data.test.labels.tolist() == IDX_ARRAYS["t10k-labels-idx1-ubyte"].tolist()
    assert data.classes[0] == "T-shirt/top"
    assert data.mean == pytest.approx([(pixels / 255).mean()], abs=1e-12)
    assert data.std == pytest.approx([(pixels / 255).std()], abs=1e-12)


def test_mnist_has_a_folder_of_its_own(tmp_path):
    write(tmp_path / "MNIST" / "raw", IDX)
    assert load_images("mnist", tmp_path).classes == tuple("0123456789")
    with refused("no fashion-mnist here"):
        load_images("fashion-mnist", tmp_path)


LABELS = IDX["t10k-labels-idx1-ubyte"]
WRONG_IDX = {
    "magic": (
        {"train-images-idx3-ubyte": LABELS},
        "train-images-idx3-ubyte: magic number 0x00000801, but an idx3-ubyte file has 0x00000803",
    ),
    "empty": ({"t10k-labels-idx1-ubyte": b""}, "magic number 0x, but"),
    "header": ({"t10k-labels-idx1-ubyte": LABELS[:6]}, "truncated, only 6 bytes"),
    "truncated": (
        {"train-images-idx3-ubyte": IDX["train-images-idx3-ubyte"][:-1]},
        "truncated or damaged, 23519 bytes of data where its header says 30 x 28 x 28",
    ),
    "counts": (
        {"train-labels-idx1-ubyte": LABELS},
        r"30 images but 10 labels in train-\*",
    ),
    "missing": ({"t10k-images-idx3-ubyte": None}, "no t10k-images-idx3-ubyte .* mnist needs"),
    "no samples": (
        {
            "t10k-images-idx3-ubyte": idx(np.zeros((0, 28, 28), np.uint8)),
            "t10k-labels-idx1-ubyte": idx(np.zeros(0, np.uint8)),
        },
        "no samples in the training or the test split of mnist",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_IDX)
def test_wrong_idx_is_refused(tmp_path, wrong):
    changes, message = WRONG_IDX[wrong]
    with refused(message):
        load_images("mnist", write(tmp_path, edited(IDX, changes)))


# Class folders ----------------------------------------------------------------------------------


def picture(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (6, 4)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def make_folders(root: Path, test: str = "val") -> Path:
    for i in range(5):
        picture(root / "train" / "cat" / f"{i}.png", (10 * i, 20, 30))
        picture(root / "train" / "dog" / f"{i}.JPEG", (200, 100, 0))
    picture(root / test / "cat" / "x.png", (1, 2, 3), (3, 2))
    picture(root / test / "dog" / "y.jpg", (200, 100, 0))
    (root / "train" / "cat" / "notes.txt").write_text("not an image")
    (root / "train" / ".cache").mkdir()
    return root


@pytest.mark.parametrize("test", ["val", "test"])
def test_folders(tmp_path, test):
    data = load_images("folder", make_folders(tmp_path, test), holdout=0)
    assert data.classes == ("cat", "dog")
    assert data.train.labels.tolist() == [0] * 5 + [1] * 5
    assert len(data.train.images) == 10
    image = data.train.images[2]
    assert image.shape == (3, 4, 6)
    assert image.dtype == torch.uint8
    assert image[:, 3, 5].tolist() == [20, 20, 30]
    assert data.test.images[0].shape == (3, 2, 3)
    assert data.mean == (0.485, 0.456, 0.406)
    assert data.std == (0.229, 0.224, 0.225)


def test_held_out_files_are_still_decoded_when_asked_for(tmp_path):
    data = load_images("folder", make_folders(tmp_path), holdout=0.3)
    assert (len(data.train), len(data.valid)) == (7, 3)
    assert not set(data.train.images.names) & set(data.valid.images.names)
    for name, label in zip(data.valid.images.names, data.valid.labels, strict=True):
        assert name.startswith(data.classes[label])
    assert len(list(data.valid.images)) == 3


def test_a_plain_folder_is_divided_class_by_class(tmp_path):
    for name, size in (("cat", 20), ("dog", 10), ("eel", 3)):
        for i in range(size):
            picture(tmp_path / name / f"{i}.png", (i, 0, 0))
    data = load_images("folder", tmp_path, holdout=0.1)
    splits = data.train, data.valid, data.test
    counts = [torch.bincount(split.labels, minlength=3).tolist() for split in splits]
    assert counts == [[16, 8, 1], [2, 1, 1], [2, 1, 1]]
    names = [name for split in splits for name in split.images.names]
    assert len(names) == len(set(names)) == 33
    for split in splits:
        for name, label in zip(split.images.names, split.labels, strict=True):
            assert name.startswith(data.classes[label])
    again, other = (load_images("folder", tmp_path, holdout_seed=seed) for seed in (0, 1))
    assert again.test.images.names == data.test.images.names
    assert other.test.images.names != data.test.images.names
    assert again.fingerprint == other.fingerprint
    with refused("three splits need 3"):
        (tmp_path / "eel" / "0.png").unlink()
        load_images("folder", tmp_path)
    with refused("must lie between 0 and 0.5"):
        load_images("folder", tmp_path, holdout=0)


def folder_task(root: Path, *settings: str) -> task.ImageTask:
    return task.ImageTask(load_recipe("images-folder", [f"data.root={root}", *settings]))


def test_a_recipe_for_images_of_ones_own(tmp_path):
    """Size and hold-out follow the data, and what says little is said."""
    for name, colour in (("cat", 0), ("dog", 200)):
        for i in range(20):
            picture(tmp_path / name / f"{i}.png", (colour, i, 0), (90, 70))
    small = folder_task(tmp_path)
    assert small.batch(torch.arange(3), 0).inputs.to("cpu").shape == (3, 3, 64, 64)
    assert [len(getattr(small.data, split)) for split in ("train", "valid", "test")] == [20, 10, 10]
    assert list(small.notes) == [
        f"the {split} split has 10 images: one of them is 10.0 points of accuracy"
        for split in ("validation", "test")
    ]
    enlarged, *_ = folder_task(tmp_path, "data.size=224").notes
    assert enlarged == (
        "the images have about 70 pixels on their shorter side and are enlarged to 224; "
        "data.size=64 is enough"
    )


def test_images_are_the_same_with_and_without_threads(tmp_path):
    root = make_folders(tmp_path)
    batches = [
        folder_task(root, f"train.workers={workers}").batch(torch.arange(5), 1)
        for workers in (0, 2)
    ]
    first, second = (batch.to("cpu").inputs for batch in batches)
    assert torch.equal(first, second)
    assert first.is_contiguous()
    assert batches[0].inputs.images.dtype == torch.uint8


def test_a_batch_that_does_not_fit_into_memory_is_refused(tmp_path, monkeypatch):
    chosen = folder_task(make_folders(tmp_path), "train.batch_size=8")
    chosen.build_model()
    monkeypatch.setattr(task, "free_memory", lambda: 2.0**20)
    with pytest.raises(RequestError, match=r"a batch of 8 images .*accumulate=3 needs"):
        chosen.build_model()


def test_of_many_gigabytes_every_file_is_looked_at_once(tmp_path, monkeypatch):
    """Its name, whether it is a regular file, and its size: the fingerprint covers no content."""
    make_folders(tmp_path)
    monkeypatch.setattr(sources, "HASHED_BYTES", 0)
    looked_at = []
    status = os.stat
    monkeypatch.setattr(os, "stat", lambda path, **more: looked_at.append(path) or status(path))
    data = load_images("folder", tmp_path, holdout=0)
    assert not [path for path in looked_at if str(path).lower().endswith((".png", ".jpg", ".jpeg"))]
    assert not data.covers_content
    picture(tmp_path / "val" / "cat" / "x.png", (1, 2, 3), (30, 20))
    assert load_images("folder", tmp_path).fingerprint != data.fingerprint


def test_records_carry_file_names(tmp_path):
    split = load_images("folder", make_folders(tmp_path), holdout=0).test
    found = list(task._records(torch.zeros(2, 2).log_softmax(-1), split))
    assert [record["file"] for record in found] == ["cat/x.png", "dog/y.jpg"]
    assert task._title(split, 1) == "dog/y.jpg"
    in_memory = ImageSplit(torch.zeros(1, 1, 2, 2, dtype=torch.uint8), torch.tensor([0]))
    assert "file" not in next(task._records(torch.zeros(1, 2), in_memory))


def test_probabilities_of_many_classes_are_packed(tmp_path):
    """They are read back to the last bit."""
    split = ImageSplit(torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 299]))
    log_p = torch.randn(2, 300, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    records = list(task._records(log_p, split))
    assert len(json.dumps(records[0])) < 6 * 300
    for record, row in zip(records, log_p.exp(), strict=True):
        found = RecordLine(record, "here").numbers("probabilities", 300, high=1)
        assert found.tolist() == row.tolist()
    records[0]["probabilities"] = "no base64"
    with pytest.raises(RequestError, match="here: 'probabilities' is not a list of numbers"):
        RecordLine(records[0], "here").numbers("probabilities")


def test_folders_with_a_validation_split_keep_it(tmp_path):
    make_folders(tmp_path, "val")
    picture(tmp_path / "test" / "dog" / "z.png", (0, 0, 0))
    data = load_images("folder", tmp_path)
    assert (len(data.train), len(data.valid), len(data.test)) == (10, 2, 1)
    assert data.test.labels.tolist() == [1]


def test_an_unlabelled_test_folder_is_passed_over(tmp_path):
    make_folders(tmp_path, "val")
    picture(tmp_path / "test" / "loose.png", (0, 0, 0))
    assert len(load_images("folder", tmp_path).test) == 2


@pytest.mark.parametrize("mode", ["P", "RGBA", "CMYK"])
def test_every_kind_of_image_becomes_rgb(tmp_path, mode):
    make_folders(tmp_path)
    suffix = "jpg" if mode == "CMYK" else "png"
    Image.new(mode, (5, 7)).save(tmp_path / "train" / "cat" / f"0.{suffix}")
    data = load_images("folder", tmp_path, holdout=0)
    assert data.train.images[0].shape == (3, 7, 5)


def damaged_png(path: Path) -> bytes:
    whole = path.read_bytes()
    return whole[:20] + b"\xff" * 8 + whole[28:]


@pytest.mark.parametrize(
    "damage",
    [lambda path: path.read_bytes()[:40], lambda path: b"", lambda path: b"text", damaged_png],
    ids=["truncated", "empty", "text", "damaged"],
)
def test_a_corrupt_image_is_named(tmp_path, damage):
    path = make_folders(tmp_path) / "train" / "cat" / "3.png"
    path.write_bytes(damage(path))
    images = load_images("folder", tmp_path, holdout=0).train.images
    assert images[2].shape == (3, 4, 6)
    with refused(re.escape(str(path)) + ": not a readable image"):
        images[3]


def test_wrong_folders_are_refused(tmp_path):
    with refused("train: no class folders; images belong in train/<class>/"):
        load_images("folder", tmp_path)
    picture(tmp_path / "train" / "cat" / "0.png", (0, 0, 0))
    with refused("neither val/<class>/ nor test/<class>/"):
        load_images("folder", tmp_path)
    picture(tmp_path / "val" / "cow" / "0.png", (0, 0, 0))
    with refused("cow: a class that is not among the training classes"):
        load_images("folder", tmp_path)
    (tmp_path / "train" / "cow").mkdir()
    with refused("cow: no image in it"):
        load_images("folder", tmp_path)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    make_folders(tmp_path)
    (tmp_path / "train" / "cat" / "link.png").symlink_to(tmp_path / "gone.png")
    with refused("link.png: cannot be read .No such file"):
        load_images("folder", tmp_path)


def test_fingerprint_of_folders_sees_names_and_content(tmp_path, monkeypatch):
    monkeypatch.setenv("LABO_CACHE", str(tmp_path / "cache"))
    first = load_images("folder", make_folders(tmp_path / "a")).fingerprint
    assert load_images("folder", make_folders(tmp_path / "b"), holdout=0.5).fingerprint == first
    changed = tmp_path / "b" / "val" / "cat"
    file = sorted(changed.iterdir())[0]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # the same size
    file.write_bytes(content)
    second = load_images("folder", tmp_path / "b").fingerprint
    assert second != first
    picture(changed / "x.png", (1, 2, 3), (30, 20))
    assert load_images("folder", tmp_path / "b").fingerprint not in (first, second)


def test_files_of_a_folder_are_hashed_once(tmp_path, monkeypatch):
    monkeypatch.setenv("LABO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(checksums, "_SETTLED", -(10**18))
    root = make_folders(tmp_path / "a")
    first = load_images("folder", root).fingerprint
    hashed = []
    monkeypatch.setattr(checksums, "sha256", lambda path: hashed.append(path.name) or "0" * 64)
    assert load_images("folder", root).fingerprint == first
    assert hashed == []
    os.utime(root / "train" / "cat" / "0.png")
    assert load_images("folder", root).fingerprint != first
    assert hashed == ["0.png"]
    monkeypatch.setenv("LABO_VERIFY", "1")
    load_images("folder", root)
    assert len(hashed) > 2


def test_a_pipe_among_the_images_is_refused(tmp_path):
    make_folders(tmp_path)
    os.mkfifo(tmp_path / "train" / "cat" / "pipe.png")
    with refused(r"pipe.png: not a regular file"):
        load_images("folder", tmp_path)


# What all of them share -------------------------------------------------------------------------


def test_digits():
    pixels, labels = datasets.load_digits(return_X_y=True)
    images, found = read_digits()
    assert torch.equal(images, torch.tensor(pixels, dtype=torch.float32) / 16)
    assert torch.equal(found, torch.tensor(labels))
    data = load_images("digits")
    assert data.train.images.shape == (1294, 1, 8, 8)
    assert data.valid.images.shape == (144, 1, 8, 8)
    assert data.test.images.shape == (359, 1, 8, 8)
    assert data.train.images.max() == 255
    assert data.test.labels.bincount().tolist() == [36, 36, 35, 37, 36, 36, 36, 36, 35, 36]
    published = torch.cat([data.train.images, data.valid.images]).double() / 255
    assert data.mean == pytest.approx([published.mean().item()])
    assert data.std == pytest.approx([published.std(correction=0).item()])
    assert data.classes == tuple("0123456789")


def test_holdout_is_a_function_of_its_seed_alone():
    torch.manual_seed(1)
    first = load_images("digits", holdout=0.2, holdout_seed=3)
    before = torch.get_rng_state()
    second = load_images("digits", holdout=0.2, holdout_seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    other = load_images("digits", holdout=0.2, holdout_seed=4)
    assert torch.equal(first.valid.images, second.valid.images)
    assert not torch.equal(first.valid.images, other.valid.images)
    assert torch.equal(first.test.images, other.test.images)
    assert first.fingerprint == other.fingerprint
    assert (first.mean, first.std) == (other.mean, other.std)


def test_holdout_parts_the_training_split(tmp_path):
    data = load_images("fashion-mnist", write(tmp_path, IDX), holdout=0.1)
    assert (len(data.train), len(data.valid)) == (27, 3)
    whole_train(data, IDX_ARRAYS["train-labels-idx1-ubyte"].tolist())
    published = torch.from_numpy(IDX_ARRAYS["train-images-idx3-ubyte"])
    for part in (data.train, data.valid):
        places = [(published == image[0]).all((1, 2)).nonzero().item() for image in part.images]
        assert places == sorted(places)


def test_requests_that_cannot_be_met(tmp_path):
    with refused("unknown data set 'cifar-10'; did you mean 'cifar10'"):
        load_images("cifar-10", tmp_path)
    with refused("cifar10 is not built in: data.root must name the folder that holds it"):
        load_images("cifar10")
    with refused(
        "digits is built in and takes no data.root: for the images in mine set data.name to"
    ):
        load_images("digits", "mine")
    with refused("nowhere: no such folder; data.root must name the folder that holds mnist"):
        load_images("mnist", tmp_path / "nowhere")
    assert issubclass(DataError, RequestError)


def test_the_archive_itself(tmp_path):
    archive = write_tar(tmp_path / "downloaded.tgz", python2_cifar10(), "cifar-10-batches-py")
    whole_train(load_images("cifar10", archive), TEN_LABELS)


def test_wrong_pickled_names_are_refused(tmp_path):
    names = {"batches.meta": pickle.dumps({"label_names": 7})}
    with refused("batches.meta: 0 class names, but CIFAR-10 has 10"):
        load_images("cifar10", write(tmp_path, edited(python2_cifar10(), names)))


def test_root_may_start_with_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "data", IDX)
    assert len(load_images("mnist", "~/data").test) == 10
