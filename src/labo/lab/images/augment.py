"""Augmentation on tensors.

Every random transform takes its random numbers ``u`` as an argument. They come from
:func:`labo.lab.run.seeds.uniforms` and depend on (seed, epoch, sample) only, so a sample is
augmented in the same way in any batch, on any process, and after a run was resumed.

Images are uint8, (N, C, H, W), until :func:`normalize`. What is cropped and resized of an image
file is in :mod:`labo.lab.images.windows`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...fields import POSITIVE
from ..run.seeds import mix
from .windows import RESIZED_CROP_DRAWS, random_box

__all__ = [
    "ERASING_DRAWS",
    "Box",
    "beta_draw",
    "check_draws",
    "choice",
    "cutmix",
    "cutmix_box",
    "mixup",
    "normalize",
    "random_crop",
    "random_crop_flip",
    "random_erasing",
    "random_flip",
    "random_rotation",
]

ERASING_DRAWS = 1 + RESIZED_CROP_DRAWS
"""Random numbers that :func:`random_erasing` takes: whether, then those of a box."""


def beta_draw(seed: int, step: int, a: float) -> float:
    """A draw from Beta(a, a) for mixup and CutMix: a pure function of the arguments."""
    POSITIVE.check("a", a)
    return random.Random(mix(seed, "beta", step)).betavariate(a, a)


def choice(u: Tensor, count: int) -> Tensor:
    """Uniform integers in [0, count) from ``u`` in [0, 1)."""
    return (u * count).long().clamp(max=count - 1)  # the product may round up to count


def check_draws(images: Tensor, u: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse images that are no batch, and random numbers of another shape."""
    if images.dim() != 4:
        raise ValueError(f"images must have shape (N, C, H, W), got {tuple(images.shape)}")
    if tuple(u.shape) != shape:
        raise ValueError(
            f"u must have shape {shape} for {len(images)} images, got {tuple(u.shape)}"
        )


def random_crop(images: Tensor, u: Tensor, padding: int = 4, *, reflect: bool = False) -> Tensor:
    """Pad on all sides and crop the original size at a random position.

    Args:
        images: (N, C, H, W).
        u: (N, 2) in [0, 1), for the row and the column.
        padding: pixels on each side.
        reflect: pad with the mirrored image, without repeating its edge, and not with zeros. Then
            ``padding`` must be smaller than the image.

    Returns:
        (N, C, H, W).
    """
    check_draws(images, u, (len(images), 2))
    height, width = images.shape[-2:]
    if reflect and padding >= min(height, width):
        raise ValueError(
            f"padding must be smaller than the image to reflect it, got {padding} for "
            f"{height} x {width} pixels"
        )
    top, left = choice(u.to(images.device), 2 * padding + 1).unbind(1)
    if reflect:  # by indices: torch's own reflection has no uint8
        rows, columns = (_reflected(size, padding).to(images.device) for size in (height, width))
        padded = images[:, :, rows[:, None], columns]
    else:
        padded = F.pad(images, (padding, padding, padding, padding))
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: (N, C, tops, lefts, H, W)
    return windows[torch.arange(len(images), device=images.device), :, top, left]


def _reflected(size: int, padding: int) -> Tensor:
    """The indices 0 to size - 1, continued on both sides by reflection: 2 1 0 1 2 3 2 1."""
    period = max(2 * (size - 1), 1)
    indices = torch.arange(-padding, size + padding).remainder(period)
    return torch.minimum(indices, period - indices)


def random_flip(images: Tensor, u: Tensor) -> Tensor:
    """Flip images with u < 1/2 horizontally; images (N, C, H, W), u (N,)."""
    check_draws(images, u, (len(images),))
    flipped = (u < 0.5).nonzero().squeeze(1).to(images.device)
    return images.index_copy(0, flipped, images[flipped].flip(-1))


def random_crop_flip(images: Tensor, u: Tensor, padding: int = 4) -> Tensor:
    """The augmentation of CIFAR: zero padding, random crop, horizontal flip.

    Args:
        images: (N, C, H, W).
        u: (N, 3) in [0, 1), for row, column and flip.
        padding: pixels on each side.

    Returns:
        (N, C, H, W).
    """
    check_draws(images, u, (len(images), 3))
    return random_flip(random_crop(images, u[:, :2], padding), u[:, 2])


def random_rotation(images: Tensor, u: Tensor, degrees: float) -> Tensor:
    """Rotate around the center by an angle in [-degrees, degrees]; nearest pixel, zeros outside.

    Args:
        images: (N, C, H, W).
        u: (N,) in [0, 1).
        degrees: the largest angle; Tf-KD uses 15.

    Returns:
        (N, C, H, W).
    """
    check_draws(images, u, (len(images),))
    n, c, height, width = images.shape
    angle = torch.deg2rad((2 * u.to(images.device).double() - 1) * degrees).view(n, 1, 1)
    # Rounded: the last bit of a sine may depend on the position in the batch, a pixel must not.
    cos, sin = angle.cos().float(), angle.sin().float()
    y = torch.arange(height, device=images.device).view(-1, 1) - (height - 1) / 2
    x = torch.arange(width, device=images.device) - (width - 1) / 2
    row = (x * sin + y * cos + (height - 1) / 2).round().long()
    column = (x * cos - y * sin + (width - 1) / 2).round().long()
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    index = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
    pixels = images.flatten(2).gather(2, index.view(n, 1, -1).expand(n, c, -1))
    return pixels.view(n, c, height, width) * inside.unsqueeze(1)


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Subtract the mean and divide by the standard deviation of each channel.

    Args:
        images: (..., C, H, W) uint8.
        mean: C numbers, for pixels in [0, 1].
        std: C numbers, for pixels in [0, 1].

    Returns:
        (..., C, H, W) float32.
    """
    if images.dtype != torch.uint8:
        raise TypeError(f"images must be uint8, got {images.dtype}")
    center = torch.tensor(mean, device=images.device).view(-1, 1, 1)
    spread = torch.tensor(std, device=images.device).view(-1, 1, 1)
    values = images.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    return values.div_(255).sub_(center).div_(spread)


def random_erasing(
    images: Tensor,
    u: Tensor,
    probability: float,
    scale: tuple[float, float] = (0.02, 1 / 3),
    ratio: tuple[float, float] = (0.3, 1 / 0.3),
) -> Tensor:
    """Random erasing (Zhong et al. 2020): a random box of some images is set to 0.

    The area of the box, as a share of that of the image, is uniform in ``scale``; its width /
    height is log-uniform in ``ratio``. There are ten tries for a box that fits; if none does, the
    image stays as it is. Of normalized images 0 is the mean color.

    Args:
        images: (N, C, H, W), normalized.
        u: (N, ERASING_DRAWS) in [0, 1).
        probability: that an image is erased at all.
        scale: smallest and largest share of the area.
        ratio: smallest and largest width / height.

    Returns:
        (N, C, H, W). The argument is not modified.
    """
    check_draws(images, u, (len(images), ERASING_DRAWS))
    height, width = images.shape[-2:]
    images = images.clone()
    for image, draws in zip(images, u.tolist(), strict=True):
        if draws[0] < probability:
            box = random_box(height, width, draws[1:], scale, ratio)
            if box is not None:
                top, left, h, w = box
                image[:, top : top + h, left : left + w] = 0
    return images


def mixup(values: Tensor, lam: float, order: Tensor) -> Tensor:
    """mixup: a weighted mean of each image, or label, with that of another sample.

    Args:
        values: normalized images (N, C, H, W), or class probabilities (N, K).
        lam: weight of the sample itself, from :func:`beta_draw`.
        order: (N,) int64, the partner of each sample, from
            :func:`labo.lab.run.seeds.permutation`.

    Returns:
        As ``values``, which are not modified.
    """
    if not values.is_floating_point():
        raise TypeError(f"values must be floating point, got {values.dtype}")
    if not 0 <= lam <= 1:
        raise ValueError(f"lam must lie in [0, 1], got {lam!r}")
    _check_order(values, order)
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

    Args:
        height: of the images.
        width: of the images.
        lam: share of the sample itself, from :func:`beta_draw`.
        centre: row and column of the center of the box, each in [0, 1).

    Returns:
        The box; ``kept`` is the weight of the sample itself in the label, by the area that is left.
    """
    if not 0 <= lam <= 1:
        raise ValueError(f"lam must lie in [0, 1], got {lam!r}")
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
    """CutMix: a box of each image comes from another sample.

    Args:
        images: (N, C, H, W).
        box: from :func:`cutmix_box`; the labels are mixed by :func:`mixup` with ``box.kept``.
        order: (N,) int64, the partner of each sample.

    Returns:
        (N, C, H, W). The argument is not modified.
    """
    _check_order(images, order)
    rows, columns = slice(box.top, box.bottom), slice(box.left, box.right)
    mixed = images.clone()
    mixed[..., rows, columns] = images[order.to(images.device), :, rows, columns]
    return mixed


def _check_order(values: Tensor, order: Tensor) -> None:
    if tuple(order.shape) != (len(values),):
        raise ValueError(f"order must have shape ({len(values)},), got {tuple(order.shape)}")
