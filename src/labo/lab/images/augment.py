"""Augmentation on tensors.

Every random transform takes its random numbers ``u`` as an argument. They come from
:func:`labo.lab.run.seeds.uniforms` and depend on (seed, epoch, sample) only, so a sample is
augmented in the same way in any batch, on any process, and after a run was resumed.

Images are uint8, (N, C, H, W) or (C, H, W), until :func:`normalize`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ...fields import POSITIVE
from ..run.seeds import mix

__all__ = [
    "ERASING_DRAWS",
    "RESIZED_CROP_DRAWS",
    "beta_draw",
    "check_draws",
    "choice",
    "cutmix",
    "mixup",
    "normalize",
    "random_crop",
    "random_crop_flip",
    "random_erasing",
    "random_flip",
    "random_resized_crop",
    "random_rotation",
    "resize_center_crop",
    "resize_cover",
]

_CROP_TRIES = 10
RESIZED_CROP_DRAWS = 2 * _CROP_TRIES + 2
"""Random numbers that :func:`random_resized_crop` takes: a shape per try, and a position."""
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
    flipped = (u < 0.5).to(images.device).view(-1, 1, 1, 1)
    return torch.where(flipped, images.flip(-1), images)


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


def _resize(image: Tensor, height: int, width: int) -> Tensor:
    """Resize a uint8 image (C, H, W): bilinear, with antialiasing."""
    resized = F.interpolate(
        image.float().unsqueeze(0), (height, width), mode="bilinear", antialias=True
    )
    return resized.squeeze(0).round().clamp(0, 255).to(torch.uint8)


def _random_box(
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


def _crop_box(
    height: int,
    width: int,
    u: Sequence[float],
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> tuple[int, int, int, int]:
    """Top, left, height and width of a random crop, by the rule of torchvision."""
    if (box := _random_box(height, width, u, scale, ratio)) is not None:
        return box
    # No try fitted: the largest center crop with an allowed ratio.
    w = min(width, round(height * ratio[1]))
    h = min(height, round(width / ratio[0]))
    return (height - h) // 2, (width - w) // 2, h, w


def random_resized_crop(
    image: Tensor,
    u: Tensor,
    size: int,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Tensor:
    """The augmentation of ImageNet: a random crop of random shape, resized to a square.

    As in torchvision there are ten tries for a crop that fits, then a center crop.

    Args:
        image: (C, H, W) uint8.
        u: (RESIZED_CROP_DRAWS,) in [0, 1).
        size: width and height of the result.
        scale: smallest and largest share of the area of the image.
        ratio: smallest and largest width / height.

    Returns:
        (C, size, size) uint8.
    """
    if tuple(u.shape) != (RESIZED_CROP_DRAWS,):
        raise ValueError(f"u must have shape ({RESIZED_CROP_DRAWS},), got {tuple(u.shape)}")
    top, left, height, width = _crop_box(image.shape[-2], image.shape[-1], u.tolist(), scale, ratio)
    return _resize(image[:, top : top + height, left : left + width], size, size)


def resize_center_crop(image: Tensor, resize: int = 256, size: int = 224) -> Tensor:
    """The evaluation transform of ImageNet: shorter side to ``resize``, then a center crop.

    Args:
        image: (C, H, W) uint8.
        resize: length of the shorter side, at least ``size``.
        size: width and height of the result.

    Returns:
        (C, size, size) uint8.
    """
    if resize < size:
        raise ValueError(f"resize must be at least size ({size}), got {resize}")
    height, width = image.shape[-2:]
    shorter = min(height, width)
    resized = _resize(image, resize * height // shorter, resize * width // shorter)
    return _center_crop(resized, size, size)


def resize_cover(image: Tensor, height: int, width: int) -> Tensor:
    """Resize to the smallest size that covers ``height`` x ``width``, then crop the center.

    Args:
        image: (C, H, W) uint8.
        height: of the result.
        width: of the result.

    Returns:
        (C, height, width) uint8.
    """
    scale = max(height / image.shape[-2], width / image.shape[-1])
    rows, columns = (round(scale * length) for length in image.shape[-2:])
    resized = _resize(image, max(rows, height), max(columns, width))
    return _center_crop(resized, height, width)


def _center_crop(image: Tensor, height: int, width: int) -> Tensor:
    top, left = (round((a - b) / 2) for a, b in zip(image.shape[-2:], (height, width), strict=True))
    return image[:, top : top + height, left : left + width]


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
    return (images.float() / 255 - center) / spread


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
            box = _random_box(height, width, draws[1:], scale, ratio)
            if box is not None:
                top, left, h, w = box
                image[:, top : top + h, left : left + w] = 0
    return images


def _check_mixable(images: Tensor, target: Tensor, lam: float, order: Tensor) -> None:
    if not target.is_floating_point() or target.dim() != 2 or len(target) != len(images):
        raise ValueError(
            f"target must be class probabilities of shape ({len(images)}, K), "
            f"got {target.dtype} of shape {tuple(target.shape)}"
        )
    if not 0 <= lam <= 1:
        raise ValueError(f"lam must lie in [0, 1], got {lam!r}")
    if tuple(order.shape) != (len(images),):
        raise ValueError(f"order must have shape ({len(images)},), got {tuple(order.shape)}")


def mixup(images: Tensor, target: Tensor, lam: float, order: Tensor) -> tuple[Tensor, Tensor]:
    """mixup: a weighted mean of each image and label with those of another sample.

    Args:
        images: (N, C, H, W) floating point.
        target: (N, K) class probabilities.
        lam: weight of the sample itself, from :func:`beta_draw`.
        order: (N,) int64, the partner of each sample, from
            :func:`labo.lab.run.seeds.permutation`.

    Returns:
        Mixed images (N, C, H, W) and targets (N, K). The arguments are not modified.
    """
    _check_mixable(images, target, lam, order)
    if not images.is_floating_point():
        raise TypeError(f"images must be floating point, got {images.dtype}")
    return lam * images + (1 - lam) * images[order], lam * target + (1 - lam) * target[order]


def cutmix(
    images: Tensor, target: Tensor, lam: float, centre: tuple[float, float], order: Tensor
) -> tuple[Tensor, Tensor]:
    """CutMix: a box of each image, and its share of the label, come from another sample.

    The sides of the box are sqrt(1 - lam) times those of the image. The box is clipped at the
    border, and the labels are mixed by the area that was actually replaced.

    Args:
        images: (N, C, H, W).
        target: (N, K) class probabilities.
        lam: share of the sample itself, from :func:`beta_draw`.
        centre: row and column of the center of the box, each in [0, 1).
        order: (N,) int64, the partner of each sample, from
            :func:`labo.lab.run.seeds.permutation`.

    Returns:
        Mixed images (N, C, H, W) and targets (N, K). The arguments are not modified.
    """
    _check_mixable(images, target, lam, order)
    height, width = images.shape[-2:]
    side = math.sqrt(1 - lam)
    top, bottom = _box_edges(height, side, centre[0])
    left, right = _box_edges(width, side, centre[1])
    mixed = images.clone()
    mixed[..., top:bottom, left:right] = images[order, :, top:bottom, left:right]
    kept = 1 - (bottom - top) * (right - left) / (height * width)
    return mixed, kept * target + (1 - kept) * target[order]


def _box_edges(length: int, side: float, centre: float) -> tuple[int, int]:
    """Start and end of a box of ``side`` times the length, clipped at the border."""
    half = int(length * side) // 2
    middle = int(length * centre)
    return max(middle - half, 0), min(middle + half, length)
