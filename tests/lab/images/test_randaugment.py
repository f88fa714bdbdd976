"""RandAugment against Pillow, and random erasing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from labo.lab.errors import RequestError
from labo.lab.images import augment
from labo.lab.images.randaugment import LARGEST, OPERATIONS, rand_augment
from labo.lab.run.seeds import uniforms

SIZE = (29, 33)  # height, width


def pictures(channels: int) -> torch.Tensor:
    """Noise, a smooth image, one of few levels, and one of a single level."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (channels, *SIZE))
    y, x = np.mgrid[: SIZE[0], : SIZE[1]]
    smooth = np.stack([3 * x + 4 * y + 20 * c for c in range(channels)])
    few = rng.integers(1, 4, (channels, *SIZE)) * 60
    flat = np.full((channels, *SIZE), 77)
    return torch.tensor(np.stack([noise, smooth, few, flat]), dtype=torch.uint8)


def pil(image: torch.Tensor) -> Image.Image:
    array = image.permute(1, 2, 0).numpy()
    return Image.fromarray(array.squeeze(-1) if array.shape[-1] == 1 else array)


def tensor(image: Image.Image) -> torch.Tensor:
    array = np.asarray(image)
    return torch.tensor(array[..., None] if array.ndim == 2 else array).permute(2, 0, 1)


def transformed(image: Image.Image, *numbers: float) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, numbers, Image.Resampling.NEAREST)


def rotated(image: Image.Image, m: float) -> Image.Image:
    cos, sin = math.cos(math.radians(30 * m)), math.sin(math.radians(30 * m))
    x, y = image.width / 2, image.height / 2
    return transformed(image, cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y)


ORACLE = {
    "identity": lambda image, m: image,
    "shear_x": lambda image, m: transformed(image, 1, 0.3 * m, 0, 0, 1, 0),
    "shear_y": lambda image, m: transformed(image, 1, 0, 0, 0.3 * m, 1, 0),
    "translate_x": lambda image, m: transformed(
        image, 1, 0, int(150 / 331 * m * image.width), 0, 1, 0
    ),
    "translate_y": lambda image, m: transformed(
        image, 1, 0, 0, 0, 1, int(150 / 331 * m * image.height)
    ),
    "rotate": rotated,
    "brightness": lambda image, m: ImageEnhance.Brightness(image).enhance(1 + 0.9 * m),
    "color": lambda image, m: ImageEnhance.Color(image).enhance(1 + 0.9 * m),
    "contrast": lambda image, m: ImageEnhance.Contrast(image).enhance(1 + 0.9 * m),
    "sharpness": lambda image, m: ImageEnhance.Sharpness(image).enhance(1 + 0.9 * m),
    "posterize": lambda image, m: ImageOps.posterize(image, 8 - round(4 * abs(m))),
    "solarize": lambda image, m: ImageOps.solarize(image, 255 * (1 - abs(m))),
    "autocontrast": lambda image, m: ImageOps.autocontrast(image),
    "equalize": lambda image, m: ImageOps.equalize(image),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_that_of_pillow(name):
    for channels in (1, 3):
        images = pictures(channels)
        for strength in (0.3, -0.3, 1.0, -0.87, 0.0):
            found = OPERATIONS[name](images, strength)
            assert found.dtype == torch.uint8
            for image, result in zip(images, found, strict=True):
                expected = tensor(ORACLE[name](pil(image), strength))
                assert torch.equal(result, expected), (channels, strength)


def test_operations_and_signs_are_drawn_evenly_and_applied_in_order():
    names = list(OPERATIONS)
    image = pictures(3)[:1]
    u = torch.tensor(
        [[(names.index("shear_x") + 0.5) / 14, 0.2, (names.index("solarize") + 0.5) / 14, 0.9]]
    )
    m = 12 / LARGEST
    expected = OPERATIONS["solarize"](OPERATIONS["shear_x"](image, -m), m)
    assert torch.equal(rand_augment(image, u, 12), expected)
    drawn = (uniforms(0, 0, torch.arange(7000), 2)[:, 0] * 14).long().bincount()
    assert drawn.min() > 400


def test_a_sample_is_augmented_the_same_alone_and_in_any_batch():
    images = pictures(3).repeat(8, 1, 1, 1)
    u = uniforms(0, 3, torch.arange(32), 4)
    together = rand_augment(images, u)
    assert not torch.equal(together, images)
    for chosen in ([5], [31, 0, 7]):
        assert torch.equal(rand_augment(images[chosen], u[chosen]), together[chosen])


def test_images_of_other_channels_are_refused():
    with pytest.raises(RequestError, match=r"data\.randaugment: .* 1 or 3 channels, not of 4"):
        rand_augment(pictures(4), torch.zeros(4, 2))


def test_erasing_sets_one_box_of_the_drawn_shape_to_zero():
    count = 400
    images = torch.ones(count, 2, 40, 30)
    u = uniforms(0, 1, torch.arange(count), augment.ERASING_DRAWS)
    erased = augment.random_erasing(images, u, 0.4)
    assert images.min() == 1
    touched = 0
    for index, image in enumerate(erased):
        assert torch.equal(image[0], image[1])
        rows, columns = (image[0] == 0).nonzero(as_tuple=True)
        assert (len(rows) > 0) == (u[index, 0] < 0.4)
        if len(rows):
            touched += 1
            height, width = int(rows.max() - rows.min()) + 1, int(columns.max() - columns.min()) + 1
            assert height * width == len(rows)  # a full rectangle
            assert 0.015 < len(rows) / 1200 < 0.36
            assert 0.25 < width / height < 4
    assert touched / count == pytest.approx(0.4, abs=0.08)
    again = augment.random_erasing(images[7:9], u[7:9], 0.4)
    assert torch.equal(again, erased[7:9])
