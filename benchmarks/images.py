"""Reading image files: ``labo train`` beside a ``DataLoader`` with one worker and the same work.

The work is that of ImageNet: decode a JPEG file of 500 x 375 pixels, take a random window, resize
it to 224 x 224, flip, normalize. Compared is the processor time per image of all threads and
processes, because that is what limits a machine with many cores.
"""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

SECONDS_OF_INTERPRETER = 1 / 2500  # per image, the most that one process may take


def _write(folder: Path, count: int, width: int, height: int) -> None:
    random = np.random.default_rng(0)
    for number in range(count):
        patches = random.integers(0, 256, (24, 32, 3), dtype=np.uint8)
        image = Image.fromarray(patches).resize((width, height), Image.Resampling.BICUBIC)
        noise = random.integers(-12, 12, (height, width, 3))
        pixels = (np.asarray(image).astype(int) + noise).clip(0, 255).astype(np.uint8)
        for split in ("train", "val"):
            path = folder / split / f"class{number % 2}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path, quality=90)


def _processor_time() -> float:
    """Of this process, its threads, and the children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _lab(root: Path, size: int, batch: int) -> Callable[[], int]:
    from labo.lab.images.task import ImageTask
    from labo.lab.recipes import load_recipe
    from labo.lab.schedule import ahead

    settings = [f"data.root={root}", f"data.size={size}", f"train.batch_size={batch}"]
    recipe: Any = load_recipe("imagenet", [*settings, "data.holdout=0.1", "train.workers=1"])
    task = ImageTask(recipe)
    positions = task.size // batch

    def turn() -> int:
        epoch = (task.batch(task.global_batch(0, i), 0) for i in range(positions))
        return sum(len(batch.to(torch.device("cpu")).inputs) for batch in ahead(epoch))

    return turn


class _Files(torch.utils.data.Dataset[Any]):
    def __init__(self, root: Path, size: int) -> None:
        from labo.lab.images.splits import IMAGENET_MEAN, IMAGENET_STD

        self.files = sorted((root / "train").rglob("*.jpg"))
        self.size = size
        self.mean, self.std = (
            np.array(values, np.float32).reshape(3, 1, 1)
            for values in (IMAGENET_MEAN, IMAGENET_STD)
        )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from labo.lab.images.windows import RESIZED_CROP_DRAWS, random_window

        image: Image.Image = Image.open(self.files[index])
        window = random_window(image.height, image.width, torch.rand(RESIZED_CROP_DRAWS), self.size)
        right, bottom = window.left + window.width, window.top + window.height
        box = (window.left, window.top, right, bottom)
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box)
        pixels = np.asarray(image)[:, :: -1 if torch.rand(()) < 0.5 else 1]
        values = (pixels.transpose(2, 0, 1).astype(np.float32) / 255 - self.mean) / self.std
        return torch.from_numpy(np.ascontiguousarray(values)), index % 2


def _loader(root: Path, size: int, batch: int) -> Callable[[], int]:
    files = _Files(root, size)

    def turn() -> int:
        loader = torch.utils.data.DataLoader(files, batch, shuffle=True, num_workers=1)
        return sum(len(images) for images, _ in loader)

    return turn


@contextmanager
def contenders(smoke: bool) -> Iterator[dict[str, Callable[[], int]]]:
    """Name -> a turn, which returns how many images it read."""
    count, batch = (16, 4) if smoke else (320, 64)
    with tempfile.TemporaryDirectory() as folder:
        large, tiny = Path(folder) / "large", Path(folder) / "tiny"
        _write(large, count, 500, 375)
        _write(tiny, count, 16, 16)
        yield {
            "labo": _lab(large, 224, batch),
            "DataLoader": _loader(large, 224, batch),
            "labo, 16 x 16 pixels": _lab(tiny, 16, batch),
        }


def seconds_per_image(turn: Callable[[], int]) -> float:
    """Seconds of processor time per image of a turn."""
    began = _processor_time()
    images = turn()
    return (_processor_time() - began) / images
