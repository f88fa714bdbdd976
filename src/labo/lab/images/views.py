"""How an image of any size becomes one that a model is given."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from .augment import resize_center_crop, resize_cover

__all__ = ["View"]


@dataclass(frozen=True)
class View:
    """Height and width of the images that a model is given, and how others are brought to them.

    Attributes:
        height: in pixels.
        width: in pixels.
        resize: length to which the shorter side is resized before the center crop, for models of
            image files. None for models of images of one size: such images are taken as they are,
            others are resized to the smallest size that covers ``height`` x ``width`` and cropped.
    """

    height: int
    width: int
    resize: int | None = None

    def __call__(self, image: Tensor) -> Tensor:
        """(C, H, W) uint8 to (C, height, width) uint8."""
        if self.resize is not None:
            return resize_center_crop(image, self.resize, self.height)
        if image.shape[-2:] == (self.height, self.width):
            return image
        return resize_cover(image, self.height, self.width)

    def facts(self) -> dict[str, Any]:
        """As it is saved with a model."""
        return asdict(self)
