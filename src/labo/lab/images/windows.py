"""The part of an image that a model is given, and reading it from a file.

A :class:`Window` is a part of an image and the size to which it is resized. Pillow crops and
resizes in one call, with antialiasing, and JPEG files are decoded at a fraction of their size where
that is enough.

Random windows take their random numbers ``u`` as an argument, see :mod:`labo.lab.images.augment`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from ..errors import DataError
from ..run.files import open_regular

_CROP_TRIES = 10
RESIZED_CROP_DRAWS = 2 * _CROP_TRIES + 2
"""Random numbers that :func:`random_window` takes: a shape per try, and a position."""
_MOST_PIXELS = 1 << 26  # of an image; a file of a few kilobytes can have many more


class Window(NamedTuple):
    """A part of an image, in pixels of the image, and the size of the result."""

    top: float
    left: float
    height: float
    width: float
    rows: int
    columns: int


Chooser = Callable[[int, int], Window]
"""From the height and width of an image to the window that is taken of it."""


def random_box(
    height: int,
    width: int,
    u: Sequence[float],
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> tuple[int, int, int, int] | None:
    """Top, left, height and width of a random box; None if no try fits into the image."""
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for area_draw, ratio_draw in zip(u[0:-2:2], u[1:-2:2], strict=True):
        area = height * width * (scale[0] + area_draw * (scale[1] - scale[0]))
        aspect = math.exp(low + ratio_draw * (high - low))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(u[-2] * (height - h + 1)), int(u[-1] * (width - w + 1)), h, w
    return None


def random_window(
    height: int,
    width: int,
    u: Tensor,
    size: int,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Window:
    """The augmentation of ImageNet: a random crop of random shape, resized to a square.

    As in torchvision there are ten tries for a crop that fits, then the largest center crop with an
    allowed ratio. u, (RESIZED_CROP_DRAWS,), is in [0, 1); ``scale`` is the share of the area, and
    ``ratio`` width / height.
    """
    box = random_box(height, width, u.tolist(), scale, ratio)
    if box is None:
        w = min(width, round(height * ratio[1]))
        h = min(height, round(width / ratio[0]))
        box = (height - h) // 2, (width - w) // 2, h, w
    return Window(*box, size, size)


def center_window(height: int, width: int, resize: int = 256, size: int = 224) -> Window:
    """The evaluation transform of ImageNet: shorter side to ``resize``, then a center crop."""
    shorter = min(height, width)
    whole = (resize * height // shorter, resize * width // shorter)
    return _center((height, width), whole, (size, size))


def cover_window(height: int, width: int, rows: int, columns: int) -> Window:
    """Resize to the smallest size that covers ``rows`` x ``columns``, then crop the center."""
    scale = max(rows / height, columns / width)
    whole = (max(round(scale * height), rows), max(round(scale * width), columns))
    return _center((height, width), whole, (rows, columns))


def _center(image: tuple[int, int], whole: tuple[int, int], size: tuple[int, int]) -> Window:
    """The center of an image that was resized to ``whole``, in pixels of the image."""
    steps = [a / b for a, b in zip(image, whole, strict=True)]
    starts = [round((a - b) / 2) for a, b in zip(whole, size, strict=True)]
    top, left = (step * start for step, start in zip(steps, starts, strict=True))
    height, width = (step * length for step, length in zip(steps, size, strict=True))
    return Window(top, left, height, width, *size)


@dataclass(frozen=True)
class View:
    """Height and width of the images that a model is given, and how others are brought to them."""

    height: int  # in pixels
    width: int  # in pixels
    # The length of the shorter side before the center crop. None for models of images of one size:
    # other images are resized to the smallest size that covers ``height`` x ``width`` and cropped.
    resize: int | None = None

    def __call__(self, height: int, width: int) -> Window:
        """The window of an image of this height and width."""
        if self.resize is not None:
            return center_window(height, width, self.resize, self.height)
        return cover_window(height, width, self.height, self.width)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A file as Pillow opens it. What is wrong with it is a DataError."""
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # refused below
    try:
        with open_regular(path) as content, Image.open(content) as file:
            if file.height * file.width > _MOST_PIXELS:
                raise DataError(
                    f"{path}: it has {file.height * file.width} pixels, and {_MOST_PIXELS} are the "
                    "most that are read"
                )
            yield file
    except UnidentifiedImageError as error:
        raise DataError(f"{path}: not a readable image") from error
    # Pillow reports damage as any of these, a broken PNG as SyntaxError.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: not a readable image ({reason})") from error


def image_size(path: Path) -> tuple[int, int]:
    """Height and width of an image file, from its header."""
    with _opened(path) as file:
        return file.height, file.width


def read_image(path: Path, choose: Chooser | None = None, channels: int = 3) -> Tensor:
    """An image file, or a window of it: (channels, H, W) uint8, grey (1 channel) or RGB (3).

    Raises:
        DataError: it cannot be read as an image.
    """
    mode = "L" if channels == 1 else "RGB"
    with _opened(path) as file:
        height, width = file.height, file.width
        window = None if choose is None else choose(height, width)
        if window is not None:
            # A JPEG file is decoded at 1/2, 1/4 or 1/8 where that has all pixels of the result.
            across, down = window.columns / window.width, window.rows / window.height
            file.draft(None, (math.ceil(width * across), math.ceil(height * down)))
        image = file if file.mode == mode else file.convert(mode)
        pixels = np.array(image if window is None else _cut(image, window, height, width))
    return torch.from_numpy(pixels).view(*pixels.shape[:2], channels).permute(2, 0, 1)


def _cut(image: Any, window: Window, height: int, width: int) -> Any:
    """A window of a Pillow image that may have been decoded at a fraction of its size."""
    down, across = image.height / height, image.width / width
    left, top = window.left * across, window.top * down
    right = min(left + window.width * across, image.width)
    bottom = min(top + window.height * down, image.height)
    box = (left, top, right, bottom)
    return image.resize((window.columns, window.rows), Image.Resampling.BILINEAR, box)


def resized(image: Tensor, choose: Chooser) -> Tensor:
    """A window of an image in memory, (C, H, W) uint8, as :func:`read_image` takes it."""
    height, width = image.shape[-2:]
    window = choose(height, width)
    planes = [_cut(Image.fromarray(plane.numpy()), window, height, width) for plane in image]
    return torch.stack([torch.from_numpy(np.array(plane)) for plane in planes])


def stacked(images: Iterable[Tensor]) -> Tensor:
    """Images (C, H, W), with the pixels of files in the order of files, as (N, C, H, W)."""
    return (
        torch.stack([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2).contiguous()
    )
