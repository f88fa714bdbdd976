"""Windows of images: crops and sizes, in memory and from files."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.nn import functional as F

from labo.lab.errors import DataError
from labo.lab.images.windows import (
    RESIZED_CROP_DRAWS,
    View,
    Window,
    center_window,
    cover_window,
    random_window,
    read_image,
    resized,
)
from labo.lab.run.seeds import uniforms


def ramp(height: int, width: int) -> torch.Tensor:
    """An image whose pixels tell where they are."""
    rows = torch.arange(height, dtype=torch.uint8).view(-1, 1).expand(height, width)
    columns = torch.arange(width, dtype=torch.uint8).expand(height, width)
    return torch.stack([rows, columns, rows + columns])


def smooth(height: int, width: int) -> Image.Image:
    """A photograph-like image: large patches of color with soft edges."""
    patches = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(patches).resize((width, height), Image.Resampling.BICUBIC)


def draws(sample: int) -> torch.Tensor:
    return uniforms(0, 0, torch.tensor([sample]), RESIZED_CROP_DRAWS)[0]


def test_a_window_of_the_whole_image_is_the_image():
    image = ramp(8, 8)
    whole = partial(random_window, u=torch.full((RESIZED_CROP_DRAWS,), 0.5), size=8)
    assert torch.equal(resized(image, partial(whole, scale=(1.0, 1.0), ratio=(1.0, 1.0))), image)
    assert torch.equal(resized(image, View(8, 8)), image)


def test_a_random_window_takes_a_part():
    """A quarter of the area, at the lower right."""
    u = torch.zeros(RESIZED_CROP_DRAWS)
    u[-2:] = 1 - 2**-24
    chosen = partial(random_window, u=u, size=32, scale=(0.25, 1.0), ratio=(1.0, 1.0))
    assert torch.equal(resized(ramp(64, 64), chosen), ramp(64, 64)[:, 32:, 32:])


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 10_000))
@settings(max_examples=100, deadline=None)
def test_windows_lie_inside_and_have_the_right_shape(height, width, sample):
    window = random_window(height, width, draws(sample), 16)
    assert 0 <= window.top <= window.top + window.height <= height
    assert 0 <= window.left <= window.left + window.width <= width
    assert min(window.height, window.width) > 0
    if min(height, width) >= 30:
        assert window.height * window.width / (height * width) > 0.08 * 0.8
        assert 3 / 4 * 0.8 < window.width / window.height < 4 / 3 * 1.25
    for view in (View(16, 16, resize=18), View(12, 20)):
        top, left, tall, wide, *size = view(height, width)
        assert size == [view.height, view.width]
        assert -1e-9 <= top <= top + tall <= height + 1e-9
        assert -1e-9 <= left <= left + wide <= width + 1e-9


@pytest.mark.parametrize(
    ("height", "width", "box"),
    [(10, 100, (0, 43, 10, 13)), (100, 10, (43, 0, 13, 10)), (10, 11, (0, 0, 10, 11))],
)
def test_a_crop_that_never_fits_is_the_center(height, width, box):
    never = torch.ones(RESIZED_CROP_DRAWS)
    assert random_window(height, width, never, 8, scale=(2.0, 2.0))[:4] == box


def test_center_and_cover():
    image = ramp(16, 24)
    chosen = partial(center_window, resize=16, size=8)
    assert torch.equal(resized(image, chosen), image[:, 4:12, 8:16])
    assert torch.equal(resized(image, View(16, 16)), image[:, :, 4:20])
    for height, width in ((375, 500), (500, 375), (10, 17), (256, 256)):
        plain = torch.full((3, height, width), 77, dtype=torch.uint8)
        for choose in (center_window, partial(cover_window, rows=224, columns=224)):
            view = resized(plain, choose)
            assert view.shape == (3, 224, 224)
            assert view.dtype == torch.uint8
            assert (view == 77).all()


def test_resizing_is_that_of_pytorch():
    """Bilinear with antialiasing: the whole image against ``F.interpolate``."""
    image = torch.from_numpy(np.array(smooth(90, 120))).permute(2, 0, 1)
    found = resized(image, lambda h, w: Window(0, 0, h, w, 45, 40))
    expected = F.interpolate(image[None].float(), (45, 40), mode="bilinear", antialias=True)[0]
    assert (found.float() - expected).abs().max() <= 1


@pytest.mark.parametrize("form", ["png", "jpg"])
def test_a_file_and_the_same_image_in_memory(tmp_path, form):
    path = tmp_path / f"image.{form}"
    smooth(120, 160).save(path)
    image = read_image(path)
    assert image.shape == (3, 120, 160)
    for sample in range(5):
        choose = partial(random_window, u=draws(sample), size=64)
        assert torch.equal(read_image(path, choose), resized(image, choose))
    assert read_image(path, View(28, 28), 1).shape == (1, 28, 28)


def test_a_large_jpeg_is_decoded_at_a_fraction_of_its_size(tmp_path, monkeypatch):
    """The pixels are those of the whole image, nearly."""
    path = tmp_path / "large.jpg"
    smooth(1200, 1600).save(path, quality=95)
    whole = resized(read_image(path), View(224, 224, resize=256))
    asked = []
    resize = Image.Image.resize

    def noted(self, *arguments):
        asked.append(self.size)
        return resize(self, *arguments)

    monkeypatch.setattr(Image.Image, "resize", noted)
    found = read_image(path, View(224, 224, resize=256))
    assert asked == [(400, 300)]
    assert (found.float() - whole.float()).abs().mean() < 1


def test_too_many_pixels(tmp_path):
    path = tmp_path / "huge.png"
    Image.new("1", (9000, 9000)).save(path)
    with pytest.raises(DataError, match="81000000 pixels, and 67108864 are the most"):
        read_image(path, View(8, 8))
