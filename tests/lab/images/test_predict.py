"""``labo predict``: the probabilities of evaluation, for files."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from command import status
from labo.lab.calibrate import calibrate_run
from labo.lab.errors import RequestError
from labo.lab.evaluate import evaluate_run
from labo.lab.images.predict import Prediction, Predictor, write_predictions
from labo.lab.images.sources import load_images
from labo.lab.run.directory import RunDirectory


@pytest.fixture(scope="module")
def run(base_run, tmp_path_factory) -> Path:
    return shutil.copytree(base_run, tmp_path_factory.mktemp("runs") / "digits")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """The first test images as files, in a folder with another folder."""
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "b").mkdir()
    images = load_images("digits").test.images
    for number in range(4):
        name = folder / ("b" if number > 2 else ".") / f"{number}.png"
        Image.fromarray(images[number, 0].numpy()).save(name)
    return folder


def records(run: Path) -> list[list[float]]:
    lines = (run / "records" / "test.jsonl").read_text().splitlines()
    return [json.loads(line)["probabilities"] for line in lines]


def test_files_get_the_probabilities_of_evaluation_after_the_temperature(run, pictures, capsys):
    evaluate_run(run, ["test"])
    expected = torch.tensor(records(run)[:4], dtype=torch.float64)
    assert status("predict", run, pictures, "--format", "jsonl", "--top", 3) == 0
    out, err = capsys.readouterr()
    assert err == (
        f"labo: {run} has no fitted temperature (labo calibrate): probabilities are as trained\n"
    )
    found = [json.loads(line) for line in out.splitlines()]
    assert [Path(line["file"]).name for line in found] == ["0.png", "1.png", "2.png", "3.png"]
    for line, row in zip(found, expected, strict=True):
        best = row.topk(3)
        assert [int(entry["class"]) for entry in line["top"]] == best.indices.tolist()
        assert [e["probability"] for e in line["top"]] == pytest.approx(best.values.tolist())
        assert (line["class"], line["probability"]) == tuple(line["top"][0].values())

    temperature = calibrate_run(run).temperature
    assert abs(temperature - 1) > 0.01
    tempered = (expected.log() / temperature).softmax(-1)
    assert status("predict", run, pictures / "0.png") == 0
    out, err = capsys.readouterr()
    assert err == ""
    (line,) = csv.DictReader(io.StringIO(out))
    assert float(line["probability"]) == pytest.approx(float(tempered[0].max()), rel=1e-5)
    assert float(line["probability_5"]) == pytest.approx(float(tempered[0].topk(5).values[-1]))
    assert list(line)[:3] == ["file", "class", "probability"]
    assert len(line) == 11


def test_a_file_that_is_no_image_is_one_line_and_the_others_are_predicted(
    run, pictures, tmp_path, capsys
):
    text, cut = tmp_path / "text.png", tmp_path / "cut.png"
    text.write_text("no image")
    cut.write_bytes((pictures / "0.png").read_bytes()[:-40])
    listed = tmp_path / "list.txt"
    listed.write_text(f"{cut}\n\n{tmp_path / 'none.png'}\n{pictures / '1.png'}\n")
    assert status("predict", run, pictures / "0.png", text, "--files-from", listed) == 1
    out, err = capsys.readouterr()
    assert [Path(row[0]).name for row in csv.reader(io.StringIO(out))] == ["file", "0.png", "1.png"]
    problems = [line for line in err.splitlines() if "temperature" not in line]
    assert problems[0] == f"labo: {text}: not a readable image"
    assert problems[1].startswith(f"labo: {cut}: not a readable image (")
    assert problems[2].endswith("none.png: not a readable image (No such file or directory)")
    assert len(problems) == 3


def test_other_sizes_and_colours_are_brought_to_those_of_the_model(run, pictures, tmp_path):
    plain = Image.open(pictures / "2.png")
    large = plain.resize((24, 24), Image.Resampling.NEAREST).convert("RGB")
    large.save(tmp_path / "large.png")
    found = list(Predictor(run).predict([pictures / "2.png", tmp_path / "large.png"]))
    assert found[0].classes[0] == found[1].classes[0]


def test_wrong_requests(run, tmp_path, capsys):
    for arguments, message in [
        ((run,), "no images: give files or folders, or --files-from"),
        ((run, tmp_path), f"{tmp_path}: no image in it (.jpg, .jpeg, .png)"),
        ((run, "--files-from", "nowhere"), "nowhere: no such file"),
        (
            (run, "x.png", "--format", "xml"),
            "Invalid value for '--format': 'xml' is not one of 'csv', 'jsonl' "
            "(labo predict --help)",
        ),
        ((tmp_path, "x.png"), f"{tmp_path} is no run with best/config.json"),
    ]:
        assert status("predict", *arguments) == 2
        assert capsys.readouterr().err == f"labo: {message}\n"
    config = RunDirectory(run).best / "config.json"
    facts = json.loads(config.read_text())
    del facts["input"]
    other = tmp_path / "model"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(facts))
    with pytest.raises(RequestError, match="does not say the size of the images"):
        Predictor(other)


def test_weights_that_are_no_numbers_are_refused(run, pictures, tmp_path, capsys):
    copy = shutil.copytree(run / "best", tmp_path / "copy")
    for name in ("manifest.json", "calibration.json"):
        (copy / name).unlink(missing_ok=True)
    weights = load_file(copy / "model.safetensors")
    next(tensor for tensor in weights.values() if tensor.dim() > 1)[0] = torch.nan
    save_file(weights, copy / "model.safetensors")
    assert status("predict", copy, pictures) == 2
    assert "are not all finite" in capsys.readouterr().err


def test_sizes_that_the_weights_do_not_have_are_refused(run, pictures, tmp_path, capsys):
    copy = shutil.copytree(run / "best", tmp_path / "copy")
    (copy / "manifest.json").unlink()
    facts = json.loads((copy / "config.json").read_text()) | {"num_classes": 10**9}
    (copy / "config.json").write_text(json.dumps(facts))
    assert status("predict", copy, pictures) == 2
    assert "num_classes is 1000000000, but the weights have" in capsys.readouterr().err


def test_names_in_a_table_are_neither_formulas_nor_commands():
    file = io.StringIO()
    names = ("=1+1", "+a", "-b", "@c", "\x1b[31mred\n", "cat")
    prediction = Prediction(Path("=evil.png"), names, (0.5, 0.1, 0.1, 0.1, 0.1, 0.1))
    write_predictions([prediction], file, "csv")
    row = list(csv.reader(io.StringIO(file.getvalue())))[1]
    assert [row[0], *row[1::2]] == [
        *("'=evil.png", "'=1+1", "'+a", "'-b", "'@c"),
        *("\\x1b[31mred\\x0a", "cat"),
    ]


def test_messages_have_no_control_characters(run, tmp_path, capsys):
    (tmp_path / "\x1b[2J.png").write_text("no image")
    assert status("predict", run, tmp_path / "\x1b[2J.png") == 1
    said = capsys.readouterr().err
    assert "\\x1b[2J.png: not a readable image" in said
    assert "\x1b" not in said
