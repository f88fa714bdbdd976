r"""RandAugment (Cubuk, Zoph, Shlens and Le, 2020) on tensors.

Each image goes through N operations, drawn uniformly and with replacement from the 14 of the paper,
all with the same magnitude M. With m = M / 30 they are:

=============  ====================================================================
identity       the image itself
shear_x, _y    shear by :math:`\pm 0.3 m`, relative to the upper left corner
translate_x,   shift by :math:`\pm \frac{150}{331} m` of the width, of the height
_y
rotate         rotate around the center by :math:`\pm 30 m` degrees
brightness     :math:`x_0 + (1 \pm 0.9 m) (x - x_0)` with :math:`x_0` black
color          the same with :math:`x_0` the gray image
contrast       the same with :math:`x_0` the mean gray level of the image
sharpness      the same with :math:`x_0` the image smoothed by a 3 x 3 filter
posterize      keep the :math:`8 - \mathrm{round}(4 m)` highest bits
solarize       invert the pixels that are at least :math:`255 (1 - m)`
autocontrast   stretch each channel to the range from 0 to 255
equalize       equalize the histogram of each channel
=============  ====================================================================

The sign is + or - with equal probability. Pixels from outside of the image are black. The ranges
are those of torchvision. The results are those of Pillow but for rounding: a pixel whose source
lies on the border of two, a level at the threshold of solarize, and levels of autocontrast (by 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import RequestError
from .augment import choice, pixels_at

LARGEST = 30.0
"""The largest magnitude."""

# (n, C, H, W) uint8 and a strength -> the same shape. Of a signed operation the strength is signed.
Operation = Callable[[Tensor, float], Tensor]


def rand_augment(images: Tensor, u: Tensor, magnitude: float = 9.0) -> Tensor:
    """N random operations on each image, (B, 1 or 3, H, W) uint8, of ``magnitude`` 0 to 30.

    u, (B, 2 N) in [0, 1), has for each operation which one it is, and its sign.
    """
    if images.shape[1] not in (1, 3):
        raise RequestError(
            f"data.randaugment: it is for images of 1 or 3 channels, not of {images.shape[1]}"
        )
    for draws in u.to(images.device).split(2, dim=-1):
        which, negative = choice(draws[:, 0], len(OPERATIONS)), draws[:, 1] < 0.5
        result = images.clone()
        for number, operation in enumerate(OPERATIONS.values()):
            for sign in (1.0, -1.0):
                chosen = (which == number) & (negative == (sign < 0))
                if bool(chosen.any()):
                    result[chosen] = operation(images[chosen], sign * magnitude / LARGEST)
        images = result
    return images


# ------------------------------------------------------------------ geometry


def _affine(images: Tensor, a: float, b: float, c: float, d: float, e: float, f: float) -> Tensor:
    """The pixel at (x, y) comes from (a x + b y + c, d x + e y + f), nearest; black outside."""
    height, width = images.shape[-2:]
    y = torch.arange(height, dtype=torch.float64, device=images.device).view(-1, 1) + 0.5
    x = torch.arange(width, dtype=torch.float64, device=images.device) + 0.5
    column, row = (a * x + b * y + c).floor().long(), (d * x + e * y + f).floor().long()
    return pixels_at(images, row, column)


def _shift(length: int, strength: float) -> int:
    return int(150 / 331 * strength * length)


def _rotate(images: Tensor, strength: float) -> Tensor:
    angle = math.radians(30 * strength)
    cos, sin = math.cos(angle), math.sin(angle)
    y, x = images.shape[-2] / 2, images.shape[-1] / 2
    return _affine(images, cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y)


# ------------------------------------------------------------------ blending


def _blend(start: Tensor, images: Tensor, strength: float) -> Tensor:
    """start + (1 + 0.9 strength) (images - start), cut to [0, 255]; start is broadcast."""
    start = start.int()
    difference = (images.int() - start).float()
    blended = start.float() + torch.tensor(1 + 0.9 * strength, dtype=torch.float32) * difference
    return blended.clamp(0, 255).to(torch.uint8)


def _gray(images: Tensor) -> Tensor:
    """(n, 1, H, W): luma of ITU-R 601, in fixed-point numbers of 16 bits."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.int().unbind(1)
    gray = (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16
    return gray.unsqueeze(1).to(torch.uint8)


def _contrast(images: Tensor, strength: float) -> Tensor:
    gray = _gray(images).long()
    size = gray[0].numel()
    mean = (2 * gray.sum((1, 2, 3), keepdim=True) + size) // (2 * size)  # rounded
    return _blend(mean, images, strength)


def _sharpness(images: Tensor, strength: float) -> Tensor:
    if min(images.shape[-2:]) < 3:
        return images
    channels = images.shape[1]
    kernel = torch.ones(channels, 1, 3, 3, device=images.device)
    kernel[..., 1, 1] = 5
    smooth = images.clone()  # the border stays
    total = F.conv2d(images.float(), kernel, groups=channels)  # whole numbers, exact in float32
    smooth[..., 1:-1, 1:-1] = (total / 13 + 0.5).floor().to(torch.uint8)
    return _blend(smooth, images, strength)


# ------------------------------------------------------------------ levels


def _autocontrast(images: Tensor, strength: float) -> Tensor:
    low, high = images.amin((-2, -1), keepdim=True), images.amax((-2, -1), keepdim=True)
    scale = 255 / (high.double() - low.double())
    stretched = (images.double() * scale + -low.double() * scale).trunc().clamp(0, 255)
    return torch.where(high > low, stretched.nan_to_num().to(torch.uint8), images)


def _equalize(images: Tensor, strength: float) -> Tensor:
    flat = images.flatten(0, 1).flatten(1).long()  # a row per channel
    counts = flat.new_zeros(len(flat), 256).scatter_add_(1, flat, torch.ones_like(flat))
    brightest = counts.gather(1, flat.amax(1, keepdim=True))
    step = (flat.shape[1] - brightest) // 255
    before = counts.cumsum(1) - counts
    levels = ((before + step // 2) // step.clamp(min=1)).clamp(max=255)
    result = torch.where(step > 0, levels.gather(1, flat), flat)
    return result.to(torch.uint8).view_as(images)


OPERATIONS: dict[str, Operation] = {
    "identity": lambda images, s: images,
    "shear_x": lambda images, s: _affine(images, 1, 0.3 * s, 0, 0, 1, 0),
    "shear_y": lambda images, s: _affine(images, 1, 0, 0, 0.3 * s, 1, 0),
    "translate_x": lambda images, s: _affine(images, 1, 0, _shift(images.shape[-1], s), 0, 1, 0),
    "translate_y": lambda images, s: _affine(images, 1, 0, 0, 0, 1, _shift(images.shape[-2], s)),
    "rotate": _rotate,
    "brightness": lambda images, s: _blend(torch.zeros_like(images[:, :, :1, :1]), images, s),
    "color": lambda images, s: _blend(_gray(images), images, s),
    "contrast": _contrast,
    "sharpness": _sharpness,
    "posterize": lambda images, s: images & (0xFF << round(4 * abs(s)) & 0xFF),
    "solarize": lambda images, s: torch.where(images >= 255 * (1 - abs(s)), 255 - images, images),
    "autocontrast": _autocontrast,
    "equalize": _equalize,
}
