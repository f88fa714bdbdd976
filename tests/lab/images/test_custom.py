"""A model and data of your own: functions that a recipe names."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from command import status
from labo.lab.custom import function_version, trust
from labo.lab.errors import RequestError
from labo.lab.evaluate import evaluate_run
from labo.lab.images.task import ImageTask
from labo.lab.recipes import load_recipe
from labo.lab.run.directory import RunDirectory
from labo.lab.tasks import load_model
from labo.lab.train import train

MODULE = """
import torch
from torch import nn
from labo.lab.images.splits import ImageSource

def net(num_classes, in_channels, width=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * 30, width), nn.Tanh(),
                         nn.Linear(width, num_classes))

def images(root, size=60):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(size) % 3
    pixels = torch.randint(0, 60, (size, 2, 6, 5), generator=generator)
    pixels[:, :, 0, 0] += 60 * labels.unsqueeze(1)
    return ImageSource.of((pixels.byte(), labels), classes=["a", "b", "c"])

def no_module(num_classes, in_channels): return lambda x: x
def fails(num_classes, in_channels): raise OSError("no weights\\nsecond line")
def narrow(num_classes, in_channels): return nn.Sequential(nn.Flatten(), nn.Linear(60, 2))
def no_source(root): return [1, 2]
def floats(root):
    return ImageSource.of((torch.zeros(9, 1, 4, 4), torch.arange(9) % 3), classes="abc",
                          mean=[0.0], std=[1.0])
def far_label(root):
    return ImageSource.of((torch.zeros(3, 1, 4, 4).byte(), torch.arange(3)), classes="ab",
                          mean=[0.1], std=[0.1])
"""
TRUSTED = "LABO_TRUSTED_CODE"
RUN = ["data.name=mine:images", "model.name=mine:net", "train.batch_size=16", "method=ls"]
RUN += ["optim.lr=0.01", "train.max_steps=20", "data.padding=0"]


@pytest.fixture
def module(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("import nowhere_to_be_found\n")
    return tmp_path / "mine.py"


def test_a_model_and_data_of_your_own_are_trained_saved_and_loaded(module, monkeypatch, capsys):
    recipe = load_recipe("digits", [*RUN, "model.arguments={width: 6}"])
    results = train(recipe, "run")
    version = function_version("model.name", "mine:net")
    assert f"~mine:net@{version}|" in results["signature"]
    facts = json.loads(Path("run/best/config.json").read_text())
    assert (facts["model"], facts["options"]) == ("mine:net", {"width": 6})
    assert facts["version"] == version
    assert facts["input"] == {"height": 6, "width": 5, "resize": None}
    assert evaluate_run("run", ["test"])["test"] == pytest.approx(results["test"])

    # Another version of the function is another run.
    module.write_text(MODULE + "# changed\n")
    monkeypatch.delitem(sys.modules, "mine")
    with pytest.raises(RequestError, match=f"data or code of run have changed: .*{version} when"):
        evaluate_run("run", ["test"])
    assert len(load_model(RunDirectory("run"))(torch.zeros(1, 2, 6, 5))[0]) == 3
    assert f"mine:net has changed since run/best was trained: it was {version}" in (
        capsys.readouterr().err
    )


def test_the_version_is_that_of_the_package_or_the_hash_of_the_file(module):
    for name in ("torch.nn:Linear", "mine:net"):
        trust(name, {})
    assert function_version("k", "torch.nn:Linear") == torch.__version__.replace("+", ".")
    assert len(function_version("k", "mine:net")) == 12


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.name=nowhere:net"], "nowhere:net: there is no module nowhere, neither"),
        (["model.name=broken:net"], "broken:net: importing it failed: ModuleNotFoundError: No mod"),
        (["model.name=mine:nett"], "model.name: mine:nett: mine has no nett"),
        (["model.name=mine:no_module"], "must return a torch.nn.Module, not function"),
        (["model.name=mine:fails"], "model.name: mine:fails failed: OSError: no weights"),
        (["model.arguments={depth: 2}"], "mine:net is called with .* unexpected keyword"),
        (["model.arguments={in_channels: 2}"], "gets in_channels from the task, not from argum"),
        (["model.name=mine:narrow"], r"shape \(2, 3\) .* returns torch.float32 of shape \(2, 2\)"),
        (["data.name=digits"], r"mine:net fails on images of shape \(2, 1, 8, 8\): RuntimeError"),
        (["data.name=mine:no_source"], "mine:no_source must return an ImageSource .*, not list"),
        (["data.name=mine:floats"], r"train: images must be a uint8 tensor .* not float32 \(9, 1"),
        (["data.name=mine:far_label"], r"label 2 of sample 2 is outside \[0, 2\)"),
        (["data.arguments={size: 2}"], "class a has 1 images; three splits need 3"),
        (["model.name=small", "model.arguments={width: 2}"], "only a function of your own has"),
        (["data.name=mine.images"], "data.name: unknown data set 'mine.images'"),
    ],
)
def test_what_does_not_fit_is_one_line_before_training(module, settings, message):
    with pytest.raises(RequestError, match=message) as caught:
        ImageTask(load_recipe("digits", [*RUN, *settings])).build_model()
    assert "\n" not in str(caught.value)


EVIL = """
from pathlib import Path
Path("imported").touch()
from mine import images, net
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that names functions."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "mine.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [path for path in sys.path if path])
        patch.setenv(TRUSTED, "")
        patch.delitem(sys.modules, "mine", raising=False)
        train(load_recipe("digits", RUN), folder / "run")
    return folder / "run"


@pytest.fixture
def foreign(trained, module, monkeypatch):
    """That run, in a process whose user named no function."""
    shutil.copytree(trained, "foreign")
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    Path("evil.py").write_text(EVIL)
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    monkeypatch.setenv(TRUSTED, "")
    return Path("foreign")


def in_model(run, reference):
    path = run / "best" / "config.json"
    facts = json.loads(path.read_text()) | {"model": reference, "in_channels": 1}
    path.write_text(json.dumps(facts))
    name, content = path.name, path.read_bytes()
    manifest = json.loads((run / "best" / "manifest.json").read_text())
    manifest["sha256"][name] = [hashlib.sha256(content).hexdigest()]
    (run / "best" / "manifest.json").write_text(json.dumps(manifest))


def in_recipe(run, reference):
    path = run / "recipe.yaml"
    path.write_text(path.read_text().replace("name: mine:images", f"name: {reference}"))


BUILT_IN = ["data.name=digits", "model.name=small", "train.max_steps=1"]
COMMANDS = {
    "predict": ["predict", "foreign", "image.png"],
    "export": ["export", "foreign", "--out", "model.onnx"],
    "evaluate": ["evaluate", "foreign"],
    "calibrate": ["calibrate", "foreign"],
    "average": ["average", "foreign"],
    "train": ["train", "digits", *BUILT_IN, "method=kd", "method.teacher=foreign"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_is_read_runs_no_code(command, foreign, capsys):
    Image.new("RGB", (5, 6)).save("image.png")
    in_model(foreign, "evil:net")
    in_recipe(foreign, "evil:images")
    assert status(*COMMANDS[command]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "evil:" in line]
    assert "is code that the folder names, not you" in line
    assert "--trust-code" in line
    assert not Path("imported").exists()
    assert "evil" not in sys.modules


def test_code_is_run_with_the_flag_and_named(foreign, capsys):
    in_recipe(foreign, "evil:images")
    (foreign / "results.json").unlink()  # they are those of another recipe now
    assert status("evaluate", "foreign", "--trust-code", "--accept-data") == 0
    assert "data.name: evil:images is imported and run" in capsys.readouterr().err
    assert Path("imported").exists()


def test_a_function_of_the_recipe_is_trusted_with_its_own_arguments_only(foreign):
    load_recipe("digits", RUN)
    load_model(RunDirectory(foreign))
    path = foreign / "best" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"options": {"width": 5}}))
    with pytest.raises(RequestError, match="mine:net is code that the folder names"):
        ImageTask.load_model(foreign / "best")
