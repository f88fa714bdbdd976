"""Vision transformers: published sizes, the logits of transformers, stochastic depth, runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForImageClassification

from lab_runs import log_of, run
from labo.lab.errors import RequestError
from labo.lab.images.task import ImageTask
from labo.lab.images.vit import VisionTransformer, _DropPath, plain_config
from labo.lab.optim import build_optimizer
from labo.lab.recipes import load_recipe
from labo.lab.run.directory import RunDirectory
from labo.lab.tasks import load_model

PARAMETERS = {
    "vit-tiny": 5_717_416,
    "vit-small": 22_050_664,
    "vit-base": 86_567_656,
    "deit-tiny": 5_717_416 + 2 * 192,  # the distillation token and its position
    "deit-small": 22_050_664 + 2 * 384,
    "deit-base": 86_567_656 + 2 * 768,
}
SMALL = {"image_size": 8, "patch": 2, "width": 12, "layers": 3, "heads": 2, "ffn": 16}


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_number_of_parameters(name):
    with torch.device("meta"):
        model = VisionTransformer(name, 1000, 3, image_size=224)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize(
    ("name", "pooling"), [("vit-lite", "sequence"), ("vit-tiny", "class"), ("deit-tiny", "mean")]
)
def test_images_to_logits_with_gradients_everywhere(name, pooling):
    model = VisionTransformer(name, 7, 1, **SMALL, pooling=pooling)
    logits = model(torch.randn(2, 1, 8, 8))
    assert logits.shape == (2, 7)
    logits.sum().backward()
    # A key's bias moves all scores of a query alike: its gradient is rounding.
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_poolings_are_what_they_say():
    states = torch.randn(2, 5, 12)
    one = VisionTransformer("vit-tiny", 7, 1, **SMALL)
    assert torch.equal(one._pooled(states), states[:, 0])
    mean = VisionTransformer("vit-tiny", 7, 1, **SMALL, pooling="mean")
    torch.testing.assert_close(mean._pooled(states), states[:, 1:].mean(1))
    deit = VisionTransformer("deit-tiny", 7, 1, **SMALL, pooling="mean")
    torch.testing.assert_close(deit._pooled(states), states[:, 2:].mean(1))
    learned = VisionTransformer("vit-lite", 7, 1, **SMALL)
    nn.init.zeros_(learned.weigher.weight)
    torch.testing.assert_close(learned._pooled(states), states[:, 1:].mean(1))
    nn.init.normal_(learned.weigher.weight)
    weights = learned.weigher(states[:, 1:]).softmax(1)
    torch.testing.assert_close(learned._pooled(states), (weights * states[:, 1:]).sum(1))


def test_images_of_another_size_are_resized():
    model = VisionTransformer("vit-tiny", 7, 1, **SMALL).eval()
    even = torch.full((1, 1, 8, 8), 0.7)
    large = torch.full((1, 1, 16, 16), 0.7)
    torch.testing.assert_close(model(large), model(even))


def test_stochastic_depth_leaves_out_layers_of_samples_and_keeps_the_mean():
    layer = nn.Linear(4, 4)
    torch.manual_seed(0)
    x = torch.randn(1, 4).expand(20_000, 3, 4)
    plain = layer(x)
    layer.register_forward_hook(_DropPath(0.25))
    y = layer(x)
    skipped = (y == x).flatten(1).all(1)
    assert skipped.float().mean() == pytest.approx(0.25, abs=0.02)
    torch.testing.assert_close(y[~skipped], (x + (plain - x) / 0.75)[~skipped])
    torch.testing.assert_close(y.mean(0), plain[0], rtol=0.05, atol=0.05)
    layer.eval()
    assert torch.equal(layer(x), plain)


def test_stochastic_depth_grows_with_the_layers():
    model = VisionTransformer("vit-tiny", 7, 1, **SMALL, drop_path=0.2)
    rates = [
        [hook.probability for hook in layer._forward_hooks.values() if isinstance(hook, _DropPath)]
        for layer in model.body.layers
    ]
    assert rates == [[], [0.1], [0.2]]


def test_weight_decay_of_matrices_only():
    model = VisionTransformer("vit-tiny", 7, 1, **SMALL)
    optim = load_recipe("cifar10-vit").optim
    matrices, vectors = build_optimizer(optim, model, nn.Identity()).param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.06, 0.0)
    assert all(p.dim() >= 2 for p in matrices["params"])
    assert len(vectors["params"]) == sum(p.dim() < 2 for p in model.parameters()) > 0


# ------------------------------------------------------------------ runs


TINY = ["model.patch=2", "model.width=12", "model.layers=2", "model.heads=2", "model.ffn=16"]
RUN = ["optim.name=adamw", "optim.lr=3e-3", "train.epochs=1", "train.batch_size=160"]
RUN += ["data.mixup=0.8", "data.cutmix=1.0"]


@pytest.mark.parametrize("name", ["vit-tiny", "deit-tiny"])
def test_plain_transformers_loads_the_selected_model(name, tmp_path):
    out = tmp_path / "run"
    arguments = ["train", "digits", *TINY, *RUN, f"model.name={name}", "--out", str(out)]
    assert run(arguments, log_of(out)) == {0}, log_of(out).read_text()
    model = load_model(RunDirectory(out)).eval()
    plain = AutoModelForImageClassification.from_pretrained(out / "best").eval()
    images = torch.randn(4, 1, 8, 8)
    torch.testing.assert_close(model(images), plain(pixel_values=images).logits)
    assert plain.config.id2label == {i: str(i) for i in range(10)}
    assert RunDirectory(out).facts()["model"] == name


def test_only_the_class_token_makes_a_plain_model():
    """vit-lite is none of transformers."""
    for name, plain in (("vit-tiny", True), ("vit-lite", False)):
        config = plain_config(VisionTransformer(name, 7, 1, **SMALL), list("abcdefg"))
        assert (config is not None) == plain


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.name=small", "model.patch=2"], "patch: only vision transformers have it, small"),
        (["model.patch=3"], "patch: 3 does not divide an image of 8"),
        (["model.patch=2", "model.heads=5"], "heads: 5 does not divide a width of 192"),
        ([], "patch: 16 does not divide an image of 8"),
    ],
)
def test_what_does_not_fit(settings, message):
    with pytest.raises(RequestError, match=message):
        ImageTask(load_recipe("digits", ["model.name=vit-tiny", *settings])).build_model()
