"""The image networks: published sizes, torchvision's names, initialization."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from labo.lab.images import networks as convnets
from labo.lab.images.networks import CONVNETS

PARAMETERS = {
    ("resnet18", 100): 11_220_132,
    ("resnet18", 10): 11_173_962,
    ("mobilenet-v2", 100): 2_369_380,
    ("mobilenet-v2", 10): 2_254_090,
    ("resnext29", 100): 34_518_948,
    ("resnext29", 10): 34_426_698,
    ("resnet50", 1000): 25_557_032,
    ("resnet152", 1000): 60_192_808,
    ("cifar-fast", 10): 1_971_338,
    ("cifar-tiny", 100): 238_900,
}


@pytest.mark.parametrize(("name", "num_classes"), PARAMETERS)
def test_published_number_of_parameters(name, num_classes):
    with torch.device("meta"):
        model = CONVNETS[name](num_classes, 3)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name, num_classes]


@pytest.mark.parametrize(
    ("name", "channels", "size"),
    [
        ("small", 1, 8),
        ("mlp", 1, 28),
        ("resnet18", 3, 16),
        ("mobilenet-v2", 3, 16),
        ("resnet50", 3, 32),
        ("cifar-fast", 1, 28),
        ("cifar-tiny", 3, 32),
    ],
)
def test_images_to_logits_with_gradients_everywhere(name, channels, size):
    model = CONVNETS[name](7, channels)
    logits = model(torch.randn(2, channels, size, size))
    assert logits.shape == (2, 7)
    logits.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def widths(name: str) -> dict[str, int]:
    """The width of the map that each part of a network makes of 32x32 images."""
    found = {}
    with torch.device("meta"):
        image = torch.empty(2, 3, 32, 32)
        for part_name, part in CONVNETS[name](10, 3).named_children():
            image = part(image)
            found[part_name] = image.shape[-1]
    return found


def test_mobilenet_maps_are_those_of_tf_kd():
    found = widths("mobilenet-v2")
    stages = [found[name] for name in ("stem", *(f"stage{i}" for i in range(1, 8)))]
    assert stages == [34, 34, 17, 9, 5, 5, 5, 5]


@pytest.mark.parametrize("name", ["resnet18", "resnext29"])
def test_cifar_networks_keep_the_resolution_at_first(name):
    found = widths(name)
    assert [found[part] for part in ("conv1", "layer1", "layer2", "layer3")] == [32, 32, 16, 8]


def test_resnet50_has_the_state_of_torchvision():
    with torch.device("meta"):
        state = convnets.resnet50().state_dict()
        block = convnets.resnet50().get_submodule("layer2.0")
    assert (block.conv1.stride, block.conv2.stride) == ((1, 1), (2, 2))
    assert len(state) == 320
    shapes = {
        "conv1.weight": (64, 3, 7, 7),
        "bn1.running_var": (64,),
        "bn1.num_batches_tracked": (),
        "layer1.0.conv1.weight": (64, 64, 1, 1),
        "layer1.0.downsample.0.weight": (256, 64, 1, 1),
        "layer1.0.downsample.1.bias": (256,),
        "layer1.2.bn3.weight": (256,),
        "layer2.0.conv2.weight": (128, 128, 3, 3),
        "layer3.5.conv3.weight": (1024, 256, 1, 1),
        "layer4.0.downsample.0.weight": (2048, 1024, 1, 1),
        "layer4.2.bn2.running_mean": (512,),
        "fc.weight": (1000, 2048),
        "fc.bias": (1000,),
    }
    assert {name: tuple(state[name].shape) for name in shapes} == shapes
    assert not any(name.startswith("layer1.1.downsample") for name in state)
    assert list(state)[:2] == ["conv1.weight", "bn1.weight"]
    assert list(state)[-1] == "fc.bias"


def test_initialisation():
    model = convnets.resnet50()
    for name in ("conv1", "layer2.0.conv2", "layer3.1.conv3"):
        conv = model.get_submodule(name)
        fan_out = conv.out_channels * conv.kernel_size[0] ** 2
        assert conv.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.05)
    classifier = convnets.cifar_resnext29(100).get_submodule("fc")
    assert classifier.bias.count_nonzero() == 0
    assert classifier.weight.std().item() == pytest.approx(math.sqrt(2 / 1024), rel=0.05)


def test_patches_are_decorrelated_and_normalized():
    """Of random images with the correlations of natural ones (a random walk along each axis)."""
    torch.manual_seed(0)
    steps = torch.randn(64, 3, 33, 33)
    images = steps.cumsum(2).cumsum(3).sum(1, keepdim=True) + 0.1 * steps
    model = convnets.DecorrelatedPatches(3)
    found = model(images)
    assert found.shape == (64, 24, 32, 32)
    assert torch.equal(found[:, 12:], -found[:, :12])
    flat = found[:, :12].transpose(0, 1).flatten(1)
    raw_variances = F.conv2d(images, model.filters).var((0, 2, 3))
    expected = raw_variances / (raw_variances + 5e-4)  # 1, but for the faintest ones
    torch.testing.assert_close(torch.cov(flat).diagonal(), expected, rtol=1e-3, atol=1e-3)
    assert 0.9 < expected.min() < 0.99 < expected.max()
    pixels = torch.stack([images[:, :, y : y + 32, x : x + 32] for y in (0, 1) for x in (0, 1)])
    raw = torch.corrcoef(pixels.permute(0, 2, 1, 3, 4).flatten(0, 1).flatten(1))
    assert raw.abs().min() > 0.9
    assert (torch.corrcoef(flat) - torch.eye(12)).abs().max() < 0.2


def test_the_blocks_of_cifar_fast_start_as_the_identity():
    block = convnets.cifar_fast(10).get_submodule("block3")
    image = torch.randn(1, 256, 7, 7)
    torch.testing.assert_close(block[0](image), image)
    torch.testing.assert_close(block[4](image), image)


def test_the_shift_after_batch_norm_moves_64_times_as_fast_and_nothing_scales():
    images, pull = 3 + 2 * torch.randn(8, 5, 4, 4), torch.randn(8, 5, 4, 4)
    ours, plain = convnets.ShiftedNorm(5), nn.BatchNorm2d(5)
    torch.testing.assert_close(ours(images), plain(images))
    for model in (ours, plain):
        (model(images) * pull).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.01).step()
    nn.init.ones_(plain.weight)
    shift = (ours(images) - plain(images)).mean((0, 2, 3)) + plain.bias
    torch.testing.assert_close(shift, 64 * plain.bias)
