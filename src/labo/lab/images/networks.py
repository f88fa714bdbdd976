"""Image classifiers: the networks of the paper's CIFAR and ImageNet tables, and four small ones.

``CONVNETS`` lists them. Each entry is a function of ``(num_classes, in_channels)`` that returns a
plain ``nn.Module`` from images (N, in_channels, H, W) to logits (N, num_classes).

``resnet50`` and ``resnet152`` have the parameter names of torchvision, so that its published
weights can be loaded, and its initialization. The CIFAR networks are the variants of Teacher-free
Knowledge Distillation (Tf-KD), which match the scores of the paper, not the larger networks of the
same names.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from ..._names import Registry


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """A convolution without bias, for use before batch norm. Stride 1 keeps the size."""
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Maps the input of a residual block to the shape of its output."""
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: (N, inputs, H, W) to (N, outputs, H', W')."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, outputs, 3, stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = _conv(outputs, outputs, 3)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return torch.relu(y + self.downsample(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut. With groups it is the block of a ResNeXt.

    The stride is on the 3x3 convolution, as in torchvision. ``width`` is that of the 3x3
    convolution, relative to the outputs.
    """

    def __init__(
        self, inputs: int, outputs: int, stride: int, *, width: float, groups: int = 1
    ) -> None:
        super().__init__()
        channels = int(width * outputs)
        self.conv1 = _conv(inputs, channels, 1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = _conv(channels, channels, 3, stride, groups)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = _conv(channels, outputs, 1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return torch.relu(y + self.downsample(x))


def _conv_bn_relu6(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, padding: int = 0, groups: int = 1
) -> list[nn.Module]:
    """The layers of MobileNetV2. As in Tf-KD, the convolution has a bias, without effect here."""
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(inplace=True),
    ]


class InvertedResidual(nn.Module):
    """The block of MobileNetV2: expand, depthwise 3x3, project; a shortcut if shapes agree."""

    def __init__(self, inputs: int, outputs: int, stride: int, *, expansion: int) -> None:
        super().__init__()
        width = inputs * expansion
        self.block = nn.Sequential(
            *_conv_bn_relu6(inputs, width, 1),
            *_conv_bn_relu6(width, width, 3, stride=stride, padding=1, groups=width),
            nn.Conv2d(width, outputs, 1),
            nn.BatchNorm2d(outputs),
        )
        self.has_shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x)
        return x + y if self.has_shortcut else y


Block = Callable[[int, int, int], nn.Module]  # of input channels, output channels and stride


def _stage(block: Block, inputs: int, outputs: int, stride: int, depth: int) -> nn.Module:
    """``depth`` blocks. The first one changes the number of channels and the size."""
    first = block(inputs, outputs, stride)
    return nn.Sequential(first, *(block(outputs, outputs, 1) for _ in range(depth - 1)))


def _sequential(parts: dict[str, nn.Module]) -> nn.Module:
    """A sequence of named parts."""
    return nn.Sequential(OrderedDict(parts))


def _stages(block: Block, depths: dict[int, int]) -> dict[str, nn.Module]:
    """The stages after a stem of 64 channels, by the names of torchvision: channels -> depth."""
    stages, inputs = {}, 64
    for number, (outputs, depth) in enumerate(depths.items(), start=1):
        stages[f"layer{number}"] = _stage(block, inputs, outputs, min(number, 2), depth)
        inputs = outputs
    return stages


def _resnet(
    stem: dict[str, nn.Module], stages: dict[str, nn.Module], features: int, num_classes: int
) -> nn.Module:
    """A residual network with the part names of torchvision."""
    head = {
        "avgpool": nn.AdaptiveAvgPool2d(1),
        "flatten": nn.Flatten(),
        "fc": nn.Linear(features, num_classes),
    }
    return _sequential({**stem, **stages, **head})


def _stem(convolution: nn.Conv2d) -> dict[str, nn.Module]:
    return {
        "conv1": convolution,
        "bn1": nn.BatchNorm2d(convolution.out_channels),
        "relu": nn.ReLU(inplace=True),
    }


def _fan_out_init(model: nn.Module) -> nn.Module:
    """He initialization of the convolutions, as in torchvision, but not of the classifier."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def cifar_resnet18(num_classes: int, in_channels: int = 3) -> nn.Module:
    """ResNet18 for 32x32 images: 3x3 stem, no max-pool. 11,220,132 parameters for 100 classes."""
    # Made before the stem: the weights that a seed gives depend on the order.
    stages = _stages(BasicBlock, {64: 2, 128: 2, 256: 2, 512: 2})
    return _resnet(_stem(_conv(in_channels, 64, 3)), stages, 512, num_classes)


def cifar_resnext29(num_classes: int, in_channels: int = 3) -> nn.Module:
    """ResNeXt29 8x64d of Tf-KD, the teacher of KD. 34,518,948 parameters for 100 classes."""
    stages = _stages(partial(Bottleneck, width=2, groups=8), {256: 3, 512: 3, 1024: 3})
    model = _resnet(_stem(_conv(in_channels, 64, 3)), stages, 1024, num_classes)
    # Tf-KD initializes the classifier as well.
    nn.init.kaiming_normal_(model.get_parameter("fc.weight"))
    nn.init.zeros_(model.get_parameter("fc.bias"))
    return _fan_out_init(model)


def _imagenet_resnet(depths: tuple[int, ...], num_classes: int, in_channels: int) -> nn.Module:
    """A bottleneck ResNet for 224x224 images, with ``depths`` blocks in its four stages."""
    stem = _stem(_conv(in_channels, 64, 7, stride=2))
    stem["maxpool"] = nn.MaxPool2d(3, stride=2, padding=1)
    channels = (256, 512, 1024, 2048)
    stages = _stages(partial(Bottleneck, width=1 / 4), dict(zip(channels, depths, strict=True)))
    return _fan_out_init(_resnet(stem, stages, 2048, num_classes))


def resnet50(num_classes: int = 1000, in_channels: int = 3) -> nn.Module:
    """ResNet50 of torchvision. 25,557,032 parameters for 1000 classes."""
    return _imagenet_resnet((3, 4, 6, 3), num_classes, in_channels)


def resnet152(num_classes: int = 1000, in_channels: int = 3) -> nn.Module:
    """ResNet152 of torchvision. 60,192,808 parameters for 1000 classes."""
    return _imagenet_resnet((3, 8, 36, 3), num_classes, in_channels)


def cifar_mobilenet_v2(num_classes: int, in_channels: int = 3) -> nn.Module:
    """MobileNetV2 of Tf-KD for 32x32 images. 2,369,380 parameters for 100 classes.

    The 1x1 stem pads by one pixel, so the feature maps are 34, 17, 9 and 5 pixels wide.
    """
    block = partial(InvertedResidual, expansion=6)
    return _sequential(
        {
            "stem": nn.Sequential(*_conv_bn_relu6(in_channels, 32, 1, padding=1)),
            "stage1": _stage(partial(InvertedResidual, expansion=1), 32, 16, 1, 1),
            "stage2": _stage(block, 16, 24, 2, 2),
            "stage3": _stage(block, 24, 32, 2, 3),
            "stage4": _stage(block, 32, 64, 2, 4),
            "stage5": _stage(block, 64, 96, 1, 3),
            "stage6": _stage(block, 96, 160, 1, 3),
            "stage7": _stage(block, 160, 320, 1, 1),
            "head": nn.Sequential(*_conv_bn_relu6(320, 1280, 1)),
            "avgpool": nn.AdaptiveAvgPool2d(1),
            "classifier": nn.Conv2d(1280, num_classes, 1),
            "flatten": nn.Flatten(),
        }
    )


def _conv_bn_relu(inputs: int, outputs: int) -> list[nn.Module]:
    return [_conv(inputs, outputs, 3), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


def small_convnet(num_classes: int, in_channels: int = 1) -> nn.Module:
    """Three 3x3 convolutions for images of 4x4 pixels or more (digits, Fashion-MNIST).

    24,058 parameters for 10 classes of gray images. It learns the digits in seconds on a CPU.
    """
    return nn.Sequential(
        *_conv_bn_relu(in_channels, 16),
        nn.MaxPool2d(2),
        *_conv_bn_relu(16, 32),
        nn.MaxPool2d(2),
        *_conv_bn_relu(32, 64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, num_classes),
    )


def fashion_mlp(num_classes: int, in_channels: int = 1) -> nn.Module:
    """784-512-512-K with ReLU, for grey images of 28 x 28 pixels; 669,706 parameters for K = 10."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(in_channels * 28 * 28, 512),
        nn.ReLU(inplace=True),
        nn.Linear(512, 512),
        nn.ReLU(inplace=True),
        nn.Linear(512, num_classes),
    )


def _cosines(size: int) -> Tensor:
    """The orthonormal cosine basis (DCT-II), (size, size), one vector per row."""
    place, order = torch.arange(size) + 0.5, torch.arange(size)
    basis = torch.cos(math.pi / size * order[:, None] * place)
    return basis / basis.norm(dim=1, keepdim=True)


class ChannelsLast(nn.Module):
    """The same images with their channels last in memory, and so in all layers that follow.

    A quarter less time on a CPU.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last)


class DecorrelatedPatches(nn.Module):
    """The 2x2 patches of an image, decorrelated and normalized, with both signs.

    (N, C, H, W) to (N, 8 C, H - 1, W - 1). The principal components of small patches of natural
    images are close to cosines, in space and over the colors. So the cosine basis and batch norm do
    what whitening by the components of a data set does, and need no data. (On CIFAR-10 the largest
    correlation of two coefficients is 0.14.)
    """

    filters: Tensor

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        colors, pixels = _cosines(in_channels), _cosines(2)
        basis = torch.einsum("ac,by,dx->abdcyx", colors, pixels, pixels)
        self.register_buffer("filters", basis.reshape(-1, in_channels, 2, 2), persistent=False)
        # eps is that of airbench94: the finest color details are mostly noise, all the more in
        # images that were compressed (variances 2e-4 to 6e-4), and are not to be amplified.
        self.norm = nn.BatchNorm2d(4 * in_channels, eps=5e-4, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(nn.functional.conv2d(x, self.filters))
        return torch.cat([y, -y], dim=1)


class Scale(nn.Module):
    """The input times a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x

    def extra_repr(self) -> str:
        return f"{self.factor:g}"


class ShiftedNorm(nn.Module):
    """Batch norm with a learned shift and no scale: (N, C, H, W) to the same shape.

    A scale would be shrunk by the weight decay that the convolutions want, and GELU is nearly
    linear for small inputs: in ten epochs it fell to 0.2. The shift is 8 times a parameter, so SGD
    moves it 64 times as fast as the weights.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        # Fast running statistics, as in airbench94: those of older steps are of another network.
        self.norm = nn.BatchNorm2d(channels, momentum=0.4, affine=False)
        self.eighth = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        # The type of y: under autocast a float32 shift would make all that follows float32.
        return y + (8 * self.eighth).to(y.dtype)[:, None, None]


def _pooled_block(inputs: int, outputs: int) -> nn.Module:
    """Two 3x3 convolutions that start as the identity, and a max-pool after the first."""
    first, second = _conv(inputs, outputs, 3), _conv(outputs, outputs, 3)
    for convolution in (first, second):
        nn.init.dirac_(convolution.weight.data[: convolution.in_channels])
    return nn.Sequential(
        first,
        nn.MaxPool2d(2),
        ShiftedNorm(outputs),
        nn.GELU(),
        second,
        ShiftedNorm(outputs),
        nn.GELU(),
    )


def cifar_fast(num_classes: int, in_channels: int = 3) -> nn.Module:
    """Six 3x3 convolutions for 32x32 images, made to train fast. 1,971,338 parameters for K = 10.

    The network of airbench94 (Jordan 2024, arXiv 2404.00498), with :class:`DecorrelatedPatches`
    for its whitening. A tenth of the multiplications of ResNet18. Its features are maxima, large
    and positive, so the logits are divided by 9: without that the last layer is unstable at the
    learning rates of the others.
    """
    return _sequential(
        {
            "channels_last": ChannelsLast(),
            "patches": DecorrelatedPatches(in_channels),
            "gelu": nn.GELU(),
            "block1": _pooled_block(8 * in_channels, 64),
            "block2": _pooled_block(64, 256),
            "block3": _pooled_block(256, 256),
            "maxpool": nn.AdaptiveMaxPool2d(1),
            "flatten": nn.Flatten(),
            "fc": nn.Linear(256, num_classes),
            "scale": Scale(1 / 9),
        }
    )


def cifar_tiny(num_classes: int, in_channels: int = 3) -> nn.Module:
    """Four convolutions, the first with stride 2, for 32x32 images. 238,900 parameters for K = 100.

    For studies of many runs on a CPU: one core trains on about 1,800 images per second.
    """
    return nn.Sequential(
        ChannelsLast(),
        nn.Conv2d(in_channels, 24, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(24),
        nn.ReLU(inplace=True),
        *_conv_bn_relu(24, 48),
        nn.MaxPool2d(2),
        *_conv_bn_relu(48, 96),
        nn.MaxPool2d(2),
        *_conv_bn_relu(96, 192),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(192, num_classes),
    )


CONVNETS = Registry(
    "model",
    {
        "small": small_convnet,
        "mlp": fashion_mlp,
        "cifar-fast": cifar_fast,
        "cifar-tiny": cifar_tiny,
        "resnet18": cifar_resnet18,
        "mobilenet-v2": cifar_mobilenet_v2,
        "resnext29": cifar_resnext29,
        "resnet50": resnet50,
        "resnet152": resnet152,
    },
)
