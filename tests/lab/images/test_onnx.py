"""The exported model gives the predictions of ``labo predict``, in onnxruntime."""

from __future__ import annotations

import json

import onnxruntime
import pytest
import torch

from command import status
from labo.lab.calibrate import calibrate_run
from labo.lab.images.predict import Predictor
from labo.lab.images.sources import load_images
from labo.lab.recipes import load_recipe
from labo.lab.train import train

TINY = ["train.max_steps=10", "method=ls"]
VIT = ["model.name=vit-lite", "model.width=16", "model.layers=1", "model.heads=2", "model.ffn=16"]


@pytest.mark.parametrize("model", [[], [*VIT, "model.image_size=16"]], ids=["convnet", "vit"])
def test_onnxruntime_gives_the_calibrated_probabilities(model, tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "model.onnx"
    train(load_recipe("digits", [*TINY, *model]), run)
    fitted = calibrate_run(run)
    capsys.readouterr()
    assert status("export", run, "--out", out) == 0
    session = onnxruntime.InferenceSession(out)
    facts = json.loads(session.get_modelmeta().custom_metadata_map["labo"])
    assert facts["classes"] == list("0123456789")
    assert facts["temperature"] == fitted.temperature != 1
    predictor = Predictor(run)
    for size in (1, 5):
        images = load_images("digits").test.images[:size]
        logits, found = session.run(None, {"images": images.numpy()})
        expected = predictor.probabilities(images)
        torch.testing.assert_close(torch.from_numpy(found), expected.float(), rtol=1e-4, atol=1e-6)
        softmax = torch.from_numpy(logits).softmax(-1)
        torch.testing.assert_close(softmax, expected.float(), rtol=1e-4, atol=1e-6)
    shown = capsys.readouterr().out
    exec(shown[shown.index("import json") :])
    assert capsys.readouterr().out.split()[0] in facts["classes"]

    assert status("export", run, "--out", out) == 2
    assert capsys.readouterr().err == f"labo: {out} exists: choose another --out\n"
    assert status("export", run, "--out", tmp_path / "b", "--to", "ctranslate2") == 2
    assert "a model for image_classification is exported to onnx" in capsys.readouterr().err
    assert status("export", run, "--out", tmp_path / "b", "--quantization", "int8") == 2
    assert status("export", run, "--out", tmp_path / "b", "--to", "tensorrt") == 2
    assert "'tensorrt' is not one of 'ctranslate2', 'onnx'" in capsys.readouterr().err
