"""Image classifiers from a Hugging Face folder: ViT, ResNet and whatever else transformers has."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import RequestError
from ..pretrained import load_config, load_folder, merged, published
from .vit import named_config


class FolderClassifier(nn.Module):
    """A classifier of transformers: images (N, C, H, W) to logits (N, num_classes).

    Images of another size than the model's are resized, grey ones are given three equal channels.
    """

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network
        size = getattr(network.config, "image_size", None)
        self.image_size: int | None = size[-1] if isinstance(size, list | tuple) else size
        self.channels: int = getattr(network.config, "num_channels", 3)

    def forward(self, images: Tensor) -> Tensor:
        size = self.image_size
        if size is not None and images.shape[-2:] != (size, size):
            images = F.interpolate(images, (size, size), mode="bilinear", antialias=True)
        if images.shape[1] == 1 != self.channels:
            images = images.expand(-1, self.channels, -1, -1)
        logits: Tensor = self.network(pixel_values=images).logits
        return logits

    @property
    def heads(self) -> list[str]:
        """The names of the modules that are not the body: the classifier."""
        body = self.network.base_model_prefix
        return [name for name, _ in self.network.named_children() if name != body]

    @property
    def output_layer(self) -> nn.Module:
        """The module that makes the logits.

        Raises:
            RequestError: there are several, or it cannot be told which it is.
        """
        if len(self.heads) != 1:
            raise RequestError(
                f"{type(self.network).__name__} has the output layers {', '.join(self.heads)}: "
                "a temperature cannot be folded in"
            )
        return getattr(self.network, self.heads[0])

    def plain_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a plain model folder holds of a ``state_dict()``."""
        return published(self.network, merged(self.network, self.network_weights(weights)))

    @staticmethod
    def network_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A ``state_dict()`` of this module as one of the network of transformers."""
        return {name.removeprefix("network."): tensor for name, tensor in weights.items()}

    def plain_config(self, classes: Sequence[str]) -> dict[str, Any]:
        """The config with which plain transformers loads the model."""
        return named_config(self.network.config, type(self.network).__name__, classes)


def load_classifier(folder: str | Path, num_classes: int | None = None) -> FolderClassifier:
    """A classifier from a folder; one for another number of classes gets a new output layer."""
    from transformers import AutoModelForImageClassification

    return FolderClassifier(
        load_folder(AutoModelForImageClassification, folder, classes=num_classes)
    )


def head_note(folder: str, classes: Sequence[str]) -> list[str]:
    """What a person should know of the output layer of a folder."""
    theirs = load_config(folder).id2label
    names = [theirs[number] for number in sorted(theirs)]
    if len(names) != len(classes):
        return [f"{folder} knows {len(names)} classes, the data {len(classes)}: new output layer"]
    if names != list(classes):
        return [f"the {len(names)} classes of {folder} have other names: taken in their order"]
    return []


def normalization(folder: str, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Mean and standard deviation of pixels that a folder asks for, if it asks for any."""
    path = Path(folder).expanduser() / "preprocessor_config.json"
    if not path.is_file():
        return None
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        mean, std = settings["image_mean"], settings["image_std"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{path}: has no image_mean and image_std ({error!r})") from error
    if len(mean) != channels or len(std) != channels:
        return None
    return tuple(map(float, mean)), tuple(map(float, std))
