"""Augmentation on tensors.

Every random transform takes its random numbers ``u``, in [0, 1), as an argument. They come from
:func:`labo.lab.run.seeds.uniforms` and depend on (seed, epoch, sample) only, so a sample is
augmented in the same way in any batch, on any process, and after a run was resumed.

Images are uint8, (N, C, H, W), until :func:`normalize`; no argument is modified. What is cropped
and resized of an image file is in :mod:`labo.lab.images.windows`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..run.seeds import mix
from .windows import RESIZED_CROP_DRAWS, random_box

ERASING_DRAWS = 1 + RESIZED_CROP_DRAWS
"""Random numbers that :func:`random_erasing` takes: whether, then those of a box."""


def beta_draw(seed: int, step: int, a: float) -> float:
    """A draw from Beta(a, a) for mixup and CutMix: a pure function of the arguments."""
    return random.Random(mix(seed, "beta", step)).betavariate(a, a)


def choice(u: Tensor, count: int) -> Tensor:
    """Uniform integers in [0, count) from ``u`` in [0, 1)."""
    return (u * count).long().clamp(max=count - 1)  # the product may round up to count


def random_crop(images: Tensor, u: Tensor, padding: int = 4, *, reflect: bool = False) -> Tensor:
    """Pad on all sides and crop the original size at a random position; u (N, 2): row and column.

    It is padded with zeros, or with the mirrored image (``reflect``), without repeating its edge.
    Then ``padding`` must be smaller than the image.
    """
    height, width = images.shape[-2:]
    top, left = choice(u.to(images.device), 2 * padding + 1).unbind(1)
    if reflect:  # as float32: older versions of torch reflect no uint8
        padded = F.pad(images.float(), (padding,) * 4, mode="reflect").to(images.dtype)
    else:
        padded = F.pad(images, (padding,) * 4)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: (N, C, tops, lefts, H, W)
    return windows[torch.arange(len(images), device=images.device), :, top, left]


def random_flip(images: Tensor, u: Tensor) -> Tensor:
    """Flip images with u < 1/2 horizontally; images (N, C, H, W), u (N,)."""
    flipped = (u < 0.5).nonzero().squeeze(1).to(images.device)
    return images.index_copy(0, flipped, images[flipped].flip(-1))


def random_rotation(images: Tensor, u: Tensor, degrees: float) -> Tensor:
    """Rotate around the center by an angle in [-degrees, degrees]; u (N,).

    The nearest pixel is taken, and zeros outside. Tf-KD uses 15 degrees.
    """
    height, width = images.shape[-2:]
    angle = torch.deg2rad((2 * u.to(images.device).double() - 1) * degrees).view(-1, 1, 1)
    # Rounded: the last bit of a sine may depend on the position in the batch, a pixel must not.
    cos, sin = angle.cos().float(), angle.sin().float()
    y = torch.arange(height, device=images.device).view(-1, 1) - (height - 1) / 2
    x = torch.arange(width, device=images.device) - (width - 1) / 2
    row = (x * sin + y * cos + (height - 1) / 2).round().long()
    column = (x * cos - y * sin + (width - 1) / 2).round().long()
    return pixels_at(images, row, column)


def pixels_at(images: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """The pixels at these places, (H, W) or (N, H, W) int64; black outside of the images."""
    n, c, height, width = images.shape
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    index = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
    index = index.expand(n, height, width).flatten(1).unsqueeze(1).expand(n, c, -1)
    return images.flatten(2).gather(2, index).view_as(images) * inside.unsqueeze(-3)


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Subtract the mean and divide by the deviation of each channel, those of pixels in [0, 1].

    Images (..., C, H, W) of uint8 become float32.
    """
    if images.dtype != torch.uint8:
        raise TypeError(f"images must be uint8, got {images.dtype}")
    center = torch.tensor(mean, device=images.device).view(-1, 1, 1)
    spread = torch.tensor(std, device=images.device).view(-1, 1, 1)
    values = images.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    return values.div_(255).sub_(center).div_(spread)


def random_erasing(images: Tensor, u: Tensor, probability: float) -> Tensor:
    """Random erasing (Zhong et al. 2020): a random box of some images is set to 0; u (N,
    ERASING_DRAWS).

    The share of the area is uniform in [0.02, 1/3], width / height log-uniform in [0.3, 1/0.3].
    There are ten tries for a box that fits; if none does, the image stays as it is. Of normalized
    images 0 is the mean color.
    """
    height, width = images.shape[-2:]
    images = images.clone()
    for image, draws in zip(images, u.tolist(), strict=True):
        if draws[0] < probability:
            box = random_box(height, width, draws[1:], (0.02, 1 / 3), (0.3, 1 / 0.3))
            if box is not None:
                top, left, h, w = box
                image[:, top : top + h, left : left + w] = 0
    return images


def mixup(values: Tensor, lam: float, order: Tensor) -> Tensor:
    """mixup: a weighted mean of each image, or label, (N, ...), with that of another sample.

    ``lam``, from :func:`beta_draw`, is the weight of the sample itself, and ``order``, (N,), the
    partner of each.
    """
    return lam * values + (1 - lam) * values[order.to(values.device)]


class Box(NamedTuple):
    """A part of an image, and the share of the image that is outside of it."""

    top: int
    bottom: int
    left: int
    right: int
    kept: float


def cutmix_box(height: int, width: int, lam: float, centre: tuple[float, float]) -> Box:
    """The box that CutMix replaces: sqrt(1 - lam) of each side, clipped at the border.

    ``centre`` is its row and column, each in [0, 1). ``kept`` is the weight of the sample itself in
    the label, by the area that is left.
    """
    side = math.sqrt(1 - lam)
    top, bottom = _box_edges(height, side, centre[0])
    left, right = _box_edges(width, side, centre[1])
    kept = 1 - (bottom - top) * (right - left) / (height * width)
    return Box(top, bottom, left, right, kept)


def _box_edges(length: int, side: float, centre: float) -> tuple[int, int]:
    """Start and end of a box of ``side`` times the length, clipped at the border."""
    half = int(length * side) // 2
    middle = int(length * centre)
    return max(middle - half, 0), min(middle + half, length)


def cutmix(images: Tensor, box: Box, order: Tensor) -> Tensor:
    """CutMix: a box of each image comes from another sample; ``box.kept`` mixes the labels."""
    rows, columns = slice(box.top, box.bottom), slice(box.left, box.right)
    mixed = images.clone()
    mixed[..., rows, columns] = images[order.to(images.device), :, rows, columns]
    return mixed
