"""A small MNIST on disk, for tests that change or damage the data of a run."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

SETTINGS = ["data.name=mnist", "data.holdout=0.2", "train.batch_size=10", "train.log_every=1"]


def idx(array: np.ndarray) -> bytes:
    """An array of bytes as an idx file."""
    header = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.tobytes()


def write_mnist(root: Path, *, seed: int = 0, size: int = 60) -> Path:
    """Noise of the shape of MNIST; another seed, other pixels."""
    root.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for prefix, count in (("train", size), ("t10k", 20)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            (root / f"{prefix}-{name}-ubyte").write_bytes(idx(array))
    return root
