"""Image classifiers from a folder: a new output layer, adapters, and a plain folder at the end."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoModelForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from lab_runs import log_of, metrics, outcome, run
from labo.lab.errors import RequestError
from labo.lab.images.task import ImageTask
from labo.lab.pretrained import load_config
from labo.lab.recipes import load_recipe
from labo.lab.run.directory import RunDirectory
from labo.lab.tasks import load_model

SETTINGS = ["model.name=null", "train.epochs=1", "train.batch_size=200", "method=ls"]
SETTINGS += ["optim.name=adamw", "optim.lr=3e-3", "train.log_every=1"]


def vit(labels: int = 10, size: int = 16) -> ViTForImageClassification:
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            image_size=size,
            patch_size=4,
            num_labels=labels,
        )
    )


def resnet(labels: int = 10) -> ResNetForImageClassification:
    return ResNetForImageClassification(
        ResNetConfig(
            embedding_size=8,
            hidden_sizes=[8, 12],
            depths=[1, 1],
            layer_type="basic",
            num_labels=labels,
        )
    )


@pytest.fixture(scope="module", params=["vit", "resnet"])
def folder(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("folder") / request.param
    torch.manual_seed(0)
    {"vit": vit, "resnet": resnet}[request.param](labels=7).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A ViT with as many classes as the data."""
    path = tmp_path_factory.mktemp("saved") / "vit"
    vit().save_pretrained(path)
    return path


def train(out: Path, folder: Path, *more: str, kill=None) -> set[int]:
    settings = [*SETTINGS, f"model.pretrained={folder}", *more]
    return run(["train", "digits", *settings, "--out", str(out)], log_of(out), 1, kill)


def task(folder: Path | str, *more: str) -> ImageTask:
    return ImageTask(load_recipe("digits", [*SETTINGS, f"model.pretrained={folder}", *more]))


def test_other_classes_get_a_new_output_layer_and_it_is_said(folder):
    small = task(folder)
    assert small.notes == [f"{folder} knows 7 classes, the data 10: new output layer"]
    model = small.build_model()
    weights = load_file(folder / "model.safetensors")
    same = [
        name
        for name, tensor in model.plain_weights(model.state_dict()).items()
        if name in weights and torch.equal(tensor, weights[name])
    ]
    assert {name for name in weights if "classifier" not in name} == set(same)
    assert model(torch.randn(2, 1, 8, 8)).shape == (2, 10)


def test_the_fine_tuned_model_is_a_plain_folder(folder, tmp_path):
    out = tmp_path / "run"
    assert train(out, folder) == {0}, log_of(out).read_text()
    assert "note:" in log_of(out).read_text()
    model = load_model(RunDirectory(out)).eval()
    plain = AutoModelForImageClassification.from_pretrained(out / "best").eval()
    images = torch.randn(4, 3, model.image_size or 8, model.image_size or 8)
    torch.testing.assert_close(model(images), plain(pixel_values=images).logits)
    assert plain.config.id2label == {i: str(i) for i in range(10)}


def test_adapters_and_the_output_layer_are_trained_and_saved_merged(tmp_path):
    torch.manual_seed(0)
    folder, out = tmp_path / "vit", tmp_path / "run"
    vit(labels=7).save_pretrained(folder)
    model = task(folder, "model.lora={rank: 2}").build_model()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name in trained if "lora_" not in name} == {
        "network.classifier.weight",
        "network.classifier.bias",
    }
    lora = "model.lora={rank: 2, save: both}"
    assert train(out, folder, lora) == {0}, log_of(out).read_text()
    before, after = (load_file(f / "model.safetensors") for f in (folder, out / "best"))
    assert before.keys() == after.keys()
    assert torch.equal(
        before["vit.embeddings.position_embeddings"], after["vit.embeddings.position_embeddings"]
    )
    changed = [name for name in before if "query.weight" in name]
    assert not torch.equal(before[changed[-1]], after[changed[-1]])
    # What was scored at the end is the merged model; while it was trained, the one with adapters.
    scores = json.loads((out / "results.json").read_text())["valid"]
    assert scores == pytest.approx(metrics(out)[-1]["valid"], rel=1e-4)

    # The adapters by themselves, on the model that the run started from.
    start = AutoModelForImageClassification.from_pretrained(
        folder, num_labels=10, ignore_mismatched_sizes=True
    )
    apart = PeftModel.from_pretrained(start, out / "best" / "adapter").eval()
    whole = AutoModelForImageClassification.from_pretrained(out / "best").eval()
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(apart(images).logits, whole(images).logits, rtol=1e-4, atol=1e-4)
    RunDirectory(out).verify_best()


def test_a_killed_run_ends_as_if_nothing_had_happened(tmp_path):
    folder = tmp_path / "vit"
    vit(labels=7).save_pretrained(folder)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    more = ("train.epochs=2", "train.save_every=2")
    assert train(whole, folder, *more) == {0}, log_of(whole).read_text()
    assert train(killed, folder, *more, kill=("step", 5)) != {0}
    assert train(killed, folder, *more) == {0}, log_of(killed).read_text()
    assert outcome(killed) == outcome(whole)


def test_frozen_parts_get_no_gradient(saved):
    model = task(saved, "model.freeze=[vit.embeddings, vit.layers.0]").build_model()
    for name, parameter in model.named_parameters():
        frozen = "embeddings" in name or "layers.0." in name
        assert parameter.requires_grad != frozen, name


def test_the_pixels_are_normalized_as_the_folder_asks(tmp_path):
    folder = tmp_path / "vit"
    vit().save_pretrained(folder)
    settings = {"image_mean": [0.5], "image_std": [0.25]}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    small = task(folder)
    assert (small.mean, small.std) == ((0.5,), (0.25,))
    plain = task(folder, "model.name=small", "model.pretrained=null")
    index = torch.arange(3)
    mean, std = plain.data.mean[0], plain.data.std[0]
    pixels = plain._plain_views(plain.data.valid, index).to("cpu") * std + mean
    expected = (pixels - 0.5) / 0.25
    torch.testing.assert_close(small._plain_views(small.data.valid, index).to("cpu"), expected)
    settings["image_mean"] = [0.1, 0.2, 0.3]  # of three channels, where the data has one
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    assert task(folder).mean == plain.data.mean


def test_the_same_number_of_other_classes_is_said(saved):
    (note,) = task(saved).notes
    assert "have other names: taken in their order" in note


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["model.name=small"], "give name or pretrained, and not both"),
        (
            ["model.name=small", "model.pretrained=null", "model.lora={rank: 2}"],
            "lora: adapters are for a pretrained model",
        ),
        (["model.pretrained=null"], "give name or pretrained"),
        (["model.patch=2"], "patch: only vision transformers have it, pretrained has not"),
        (["model.pretrained=nowhere"], "nowhere: no such folder"),
        (["model.freeze=[vitt]"], r"model\.freeze: vitt fits no parameter"),
        (["model.lora={targets: [classifier]}"], "classifier is the output layer"),
    ],
)
def test_wrong_requests(saved, more, message):
    with pytest.raises(RequestError, match=message) as caught:
        task(saved, *more).build_model()
    assert "\n" not in str(caught.value)


def test_adapters_without_peft(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        RequestError, match=r"^model\.lora needs PEFT: pip install 'torch-labo\[lora"
    ):
        task(saved, "model.lora={rank: 2}").build_model()


def test_freezing_a_fresh_network():
    model = ImageTask(load_recipe("digits", ["model.freeze=['0']"])).build_model()
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["0.weight"]


@pytest.mark.parametrize(
    "config",
    [
        {"attn_implementation": "owner/kernel"},
        {"vision_config": {"_attn_implementation": {"": "owner/kernel@main"}}},
    ],
)
def test_a_folder_that_names_code_of_a_hub_is_refused(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", **config}))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(RequestError, match=r"owner/kernel.* is code from elsewhere"):
        load_config(tmp_path)
