"""Vision transformers: ViT and DeiT of ``transformers``, from a preset.

``vit-lite`` is for small images, in the manner of "Escaping the Big Data Paradigm with Compact
Transformers" (Hassani et al. 2021): patches of 4 pixels, 7 layers, and a classifier that sees an
average over the patches, by learned weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..._names import Registry
from ..errors import RequestError

Pooling = Literal["class", "mean", "sequence"]

TRANSFORMERS = Registry(
    "model",
    {
        "vit-lite": {"width": 256, "layers": 7, "heads": 4, "ffn": 512, "patch": 4},
        **{
            f"{kind}-{size}": {"width": width, "layers": 12, "heads": heads, "patch": 16}
            for kind in ("vit", "deit")
            for size, width, heads in (("tiny", 192, 3), ("small", 384, 6), ("base", 768, 12))
        },
    },
)


class _DropPath:
    """A hook that leaves out a layer for some samples (stochastic depth, Huang et al. 2016).

    What is kept is scaled, so that the expectation stays. Attention and feed-forward of a layer go
    together.
    """

    def __init__(self, probability: float) -> None:
        self.probability = probability

    def __call__(self, layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        if not layer.training:
            return output
        kept = 1 - self.probability
        shape = (len(output),) + (1,) * (output.dim() - 1)
        mask = torch.empty(shape, device=output.device, dtype=output.dtype).bernoulli_(kept)
        return inputs[0] + (output - inputs[0]) * (mask / kept)


class VisionTransformer(nn.Module):
    """Images (N, channels, H, W) to logits (N, num_classes).

    With pooling "class" the parameters have the names of ``ViTForImageClassification`` or
    ``DeiTForImageClassification``. What is None is as the preset of ``name`` says. Images of
    another size than ``image_size`` are resized. The other arguments are keys of the recipe.

    Raises:
        RequestError: the patch does not divide the image, or the heads the width.

    Example:
        >>> model = VisionTransformer("vit-lite", 10, 3, image_size=32)
        >>> model(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        name: str,
        num_classes: int,
        channels: int = 3,
        *,
        image_size: int,
        patch: int | None = None,
        width: int | None = None,
        layers: int | None = None,
        heads: int | None = None,
        ffn: int | None = None,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        pooling: Pooling | None = None,
    ) -> None:
        from transformers import DeiTConfig, DeiTModel, ViTConfig, ViTModel

        super().__init__()
        preset = TRANSFORMERS[name]
        patch = patch or preset["patch"]
        width = width or preset["width"]
        heads = heads or preset["heads"]
        if image_size % patch:
            raise RequestError(f"model.patch: {patch} does not divide an image of {image_size}")
        if width % heads:
            raise RequestError(f"model.heads: {heads} does not divide a width of {width}")
        self.kind = name.partition("-")[0]
        self.image_size = image_size
        self.pooling = pooling or ("sequence" if name == "vit-lite" else "class")
        config = (DeiTConfig if self.kind == "deit" else ViTConfig)(
            hidden_size=width,
            num_hidden_layers=layers or preset["layers"],
            num_attention_heads=heads,
            intermediate_size=ffn or preset.get("ffn", 4 * width),
            image_size=image_size,
            patch_size=patch,
            num_channels=channels,
            hidden_dropout_prob=dropout,
            num_labels=num_classes,
        )
        body = (DeiTModel if self.kind == "deit" else ViTModel)(config, add_pooling_layer=False)
        self.add_module(self.kind, body)
        self.classifier = nn.Linear(width, num_classes)
        nn.init.trunc_normal_(self.classifier.weight, std=0.02)
        nn.init.zeros_(self.classifier.bias)
        self.weigher = nn.Linear(width, 1) if self.pooling == "sequence" else None
        self._special = 2 if self.kind == "deit" else 1  # tokens before the patches
        if drop_path:
            last = max(1, config.num_hidden_layers - 1)
            for number, layer in enumerate(body.layers):
                if number:
                    layer.register_forward_hook(_DropPath(drop_path * number / last))

    @property
    def body(self) -> Any:
        """The transformer, without the classifier."""
        return getattr(self, self.kind)

    def forward(self, images: Tensor) -> Tensor:
        size = (self.image_size, self.image_size)
        if images.shape[-2:] != size:
            images = F.interpolate(images, size, mode="bilinear", antialias=True)
        return self.classifier(self._pooled(self.body(images).last_hidden_state))

    def _pooled(self, states: Tensor) -> Tensor:
        if self.pooling == "class":
            return states[:, 0]
        patches = states[:, self._special :]
        if self.weigher is None:
            return patches.mean(1)
        weights = self.weigher(patches).softmax(1)
        return (weights * patches).sum(1)


def plain_config(model: VisionTransformer, classes: list[str]) -> Mapping[str, Any] | None:
    """The config with which plain transformers loads the model; None if it cannot.

    It has a classifier for the class token only.
    """
    if model.pooling != "class":
        return None
    name = "DeiTForImageClassification" if model.kind == "deit" else "ViTForImageClassification"
    return named_config(model.body.config, name, classes)


def named_config(config: Any, architecture: str, classes: Sequence[str]) -> dict[str, Any]:
    """A config of transformers as a dict, with the names of the architecture and the classes."""
    found: dict[str, Any] = config.to_dict()
    return found | {
        "architectures": [architecture],
        "id2label": {str(number): label for number, label in enumerate(classes)},
        "label2id": {label: number for number, label in enumerate(classes)},
    }
