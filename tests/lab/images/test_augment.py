"""Augmentation: chance as a function of (seed, epoch, sample), and where each pixel comes from."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labo.lab.errors import RequestError
from labo.lab.images import augment
from labo.lab.images.task import ImageTask
from labo.lab.recipes import load_recipe
from labo.lab.run.seeds import mix, permutation, uniforms


def numbered(n: int, channels: int = 2, height: int = 6, width: int = 5) -> torch.Tensor:
    """Images in which no two pixels of a channel are equal and none is 0."""
    pixels = 1 + torch.arange(channels * height * width).view(channels, height, width)
    return ((pixels + 7 * torch.arange(n).view(-1, 1, 1, 1)) % 250 + 1).to(torch.uint8)


def splitmix64(x: int) -> int:
    """The finalizer as published, in Python's unbounded integers."""
    mask = (1 << 64) - 1
    x &= mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def test_uniforms_are_the_hash_they_claim_to_be():
    index = torch.tensor([0, 1, 12_345_678])
    expected = [
        [(splitmix64(splitmix64(i + mix(5, "augment", 2)) + j) >> 40) / 2**24 for j in range(3)]
        for i in index.tolist()
    ]
    assert uniforms(5, 2, index, 3).tolist() == expected


def test_uniforms_never_change():
    """Golden: a resumed run may meet another version of PyTorch."""
    u = uniforms(0, 3, torch.tensor([7, 8]), 2)
    assert (u * 2**24).tolist() == [[8730580, 10855594], [1376025, 10229019]]
    assert permutation(0, 3, 8).tolist() == [1, 3, 7, 4, 6, 0, 2, 5]
    assert augment.beta_draw(0, 4, 1.0) == pytest.approx(0.5628753004362427, abs=1e-12)


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=20), st.integers(0, 19))
@settings(max_examples=50, deadline=None)
def test_a_sample_draws_the_same_alone_and_in_any_batch(samples, place):
    place %= len(samples)
    batch = uniforms(3, 9, torch.tensor(samples), 5)
    alone = uniforms(3, 9, torch.tensor([samples[place]]), 2)
    assert torch.equal(batch[place, :2], alone[0])


def test_global_generator_is_not_touched():
    before = torch.get_rng_state()
    uniforms(0, 0, torch.arange(4096), 3)
    permutation(0, 0, 100)
    augment.beta_draw(0, 0, 0.2)
    assert torch.equal(torch.get_rng_state(), before)


def test_permutation_is_one():
    order = permutation(0, 0, 1000)
    assert order.sort().values.tolist() == list(range(1000))
    assert not torch.equal(order, permutation(0, 1, 1000))
    assert not torch.equal(order, permutation(1, 0, 1000))


BATCHED = {
    "crop": (lambda images, u: augment.random_crop(images, u[:, :2], 3), 2),
    "reflected crop": (lambda images, u: augment.random_crop(images, u, 3, reflect=True), 2),
    "flip": (lambda images, u: augment.random_flip(images, u[:, 0]), 1),
    "rotation": (lambda images, u: augment.random_rotation(images, u[:, 0], 40), 1),
}


@pytest.mark.parametrize("name", BATCHED)
def test_a_sample_looks_the_same_alone_and_in_any_batch(name):
    function, count = BATCHED[name]
    images, index = numbered(33), torch.arange(100, 133)
    before = images.clone()
    together = function(images, uniforms(0, 4, index, count))
    assert together.shape == images.shape
    assert together.dtype == torch.uint8
    assert torch.equal(images, before)
    for chosen in ([5], [32, 0, 7]):
        some = function(images[chosen], uniforms(0, 4, index[chosen], count))
        assert torch.equal(some, together[chosen])


def test_every_crop_is_a_shifted_copy():
    padding, (height, width) = 2, (6, 5)
    places = torch.cartesian_prod(torch.arange(5), torch.arange(5))
    images = numbered(25)
    crops = augment.random_crop(images, (places + 0.5) / 5, padding)
    for image, crop, (top, left) in zip(images, crops, places.tolist(), strict=True):
        expected = torch.zeros_like(image)
        for row in range(height):
            for column in range(width):
                y, x = row + top - padding, column + left - padding
                if 0 <= y < height and 0 <= x < width:
                    expected[:, row, column] = image[:, y, x]
        assert torch.equal(crop, expected)


def test_crops_reach_every_place_and_nothing_beyond():
    image = torch.full((3, 1, 1, 1), 9, dtype=torch.uint8)
    extremes = torch.tensor([[0.0, 0.0], [1 - 2**-24, 1 - 2**-24], [0.5, 0.5]])
    assert augment.random_crop(image, extremes, 4).flatten().tolist() == [0, 0, 9]
    assert augment.random_crop(image, extremes, 300).shape == (3, 1, 1, 1)


@given(st.integers(2, 9), st.integers(2, 9), st.data())
@settings(max_examples=40, deadline=None)
def test_a_reflected_crop_is_a_window_of_torchs_reflection(height, width, data):
    padding = data.draw(st.integers(0, min(height, width) - 1))
    top, left = (data.draw(st.integers(0, 2 * padding)) for _ in range(2))
    images = numbered(2, height=height, width=width).expand(2, 2, height, width)
    u = torch.tensor([[top + 0.5, left + 0.5]]).expand(2, 2) / (2 * padding + 1)
    crops = augment.random_crop(images, u, padding, reflect=True)
    padded = torch.nn.functional.pad(images.float(), (padding,) * 4, mode="reflect")
    expected = padded[:, :, top : top + height, left : left + width]
    assert torch.equal(crops, expected.to(torch.uint8))


def test_alternating_flips_show_every_image_once_in_each_direction():
    task = ImageTask(load_recipe("digits", ["data.flip=alternate", "data.padding=0"]))
    index = torch.arange(200)
    epochs = [task.batch(index, epoch).inputs.to("cpu") for epoch in range(4)]
    assert torch.equal(epochs[1], epochs[0].flip(-1))
    assert torch.equal(epochs[2], epochs[0])
    assert torch.equal(epochs[3], epochs[1])
    plain = ImageTask(load_recipe("digits", ["data.flip=false", "data.padding=0"]))
    same = (plain.batch(index, 0).inputs.to("cpu") == epochs[0]).flatten(1).all(1)
    assert 70 < same.sum() < 130
    assert torch.equal(task.batch(index[7:9], 1).inputs.to("cpu"), epochs[1][7:9])


def test_padding_that_cannot_be_reflected_is_refused_before_training():
    settings = ["data.padding=8", "data.padding_mode=reflect"]
    with pytest.raises(RequestError, match=r"data\.padding: 8 pixels cannot be reflected"):
        ImageTask(load_recipe("digits", settings))
    settings[0] = "data.padding=7"
    crops = ImageTask(load_recipe("digits", settings)).batch(torch.arange(9), 0).inputs
    assert crops.images.shape == (9, 1, 8, 8)


def test_rotation_by_right_angles_moves_pixels_exactly():
    image = numbered(1, height=5, width=5)
    turned = {
        degrees: augment.random_rotation(image, torch.zeros(1), degrees)
        for degrees in (0, 90, 180, 360)
    }
    assert torch.equal(turned[0], image)
    assert torch.equal(turned[360], image)
    assert torch.equal(turned[180], image.flip(-1, -2))
    assert torch.equal(turned[90], image.rot90(1, (-1, -2)))


def test_rotation_fills_corners_with_zeros_and_invents_no_pixel():
    image = numbered(1, channels=1, height=9, width=9)
    turned = augment.random_rotation(image, torch.ones(1) * 0.999, 45)
    assert turned[0, 0, 0, 0] == 0
    assert turned[0, 0, 4, 4] == image[0, 0, 4, 4]
    assert set(turned.flatten().tolist()) <= {0, *image.flatten().tolist()}


def test_normalize():
    images = torch.tensor([0, 255], dtype=torch.uint8).view(1, 2, 1, 1)
    result = augment.normalize(images, (0.5, 0.25), (0.5, 0.25))
    assert result.dtype == torch.float32
    assert result.flatten().tolist() == [-1.0, 3.0]
    torch.testing.assert_close(augment.normalize(images[0], (0.5, 0.25), (0.5, 0.25)), result[0])
    with pytest.raises(TypeError, match="images must be uint8"):
        augment.normalize(images.float(), (0, 0), (1, 1))


IMAGES = torch.randn(5, 3, 8, 6, generator=torch.Generator().manual_seed(0))
TARGET = torch.eye(4)[[0, 1, 2, 3, 0]]
ORDER = torch.tensor([3, 2, 4, 0, 1])


def test_mixup_blends_images_and_labels_alike():
    before = IMAGES.clone()
    images, target = (augment.mixup(values, 0.7, ORDER) for values in (IMAGES, TARGET))
    torch.testing.assert_close(images[0], 0.7 * IMAGES[0] + 0.3 * IMAGES[3])
    torch.testing.assert_close(target[0], torch.tensor([0.7, 0.0, 0.0, 0.3]))
    torch.testing.assert_close(target.sum(1), torch.ones(5))
    assert torch.equal(IMAGES, before)


@given(st.floats(0, 1), st.floats(0, 0.999), st.floats(0, 0.999))
@settings(max_examples=100, deadline=None)
def test_cutmix_mixes_labels_by_the_pixels_it_took(lam, row, column):
    before = IMAGES.clone()
    box = augment.cutmix_box(8, 6, lam, (row, column))
    images = augment.cutmix(IMAGES, box, ORDER)
    own, other = (images == IMAGES).all(1), (images == IMAGES[ORDER]).all(1)
    assert (own ^ other).all()
    assert box.kept == pytest.approx(own[0].float().mean().item())
    assert torch.equal(IMAGES, before)


def test_cutmix_box():
    """Half of each side about the middle; at a corner a quarter of that is left."""
    assert augment.cutmix_box(8, 6, 0.75, (0.5, 0.5)) == (2, 6, 2, 4, pytest.approx(1 - 8 / 48))
    assert augment.cutmix_box(8, 6, 0.75, (0.0, 0.0)) == (0, 2, 0, 1, pytest.approx(1 - 2 / 48))
