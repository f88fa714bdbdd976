"""``labo calibrate``: the temperature of a run, where it is stored, and who uses it."""

from __future__ import annotations

import io
import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForSeq2SeqLM

from lab_runs import log_of, plain_net, run
from labo.calibration import fit_temperature
from labo.lab.analysis.reading import read_run
from labo.lab.calibrate import _Replayed, calibrate_run
from labo.lab.errors import RequestError
from labo.lab.evaluate import evaluate_run
from labo.lab.images.networks import CONVNETS
from labo.lab.recipes import recipe_of
from labo.lab.run.calibration import divisor_of, read_calibration
from labo.lab.run.directory import RunDirectory
from labo.lab.run.files import sealed
from labo.lab.tasks import find_task, load_model
from labo.lab.translation.export import export
from labo.lab.translation.translate import ModelFolder, Translator, translate_stream

IMAGES = ["method=ls", "model.name=plain", "train.epochs=2"]
TEXT = ["cldr", "method=ls", "data.size=400", "data.vocabulary=400", "model.width=16"]
TEXT += ["model.ffn=32", "model.heads=2", "model.positions=128", "model.dropout=0.0"]
TEXT += ["model.encoder_layers=1", "model.decoder_layers=1", "train.batch_tokens=256"]
TEXT += ["train.epochs=2", "decode.beam=2", "optim.warmup_steps=5"]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABO_CACHE", str(folder))
        yield folder


def trained(out: Path, settings: list[str], cache: Path) -> Path:
    environment = {"LABO_CACHE": str(cache)}
    codes = run(["train", *settings, "--out", str(out)], log_of(out), environment=environment)
    assert codes == {0}, log_of(out).read_text()
    return out


@pytest.fixture
def images(run_of):
    return run_of(*IMAGES)


@pytest.fixture(scope="module")
def text(tmp_path_factory, cache):
    return trained(tmp_path_factory.mktemp("text") / "run", TEXT, cache)


@pytest.fixture(scope="module")
def separate(tmp_path_factory, cache):
    settings = [*TEXT, "model.embeddings=separate"]
    return trained(tmp_path_factory.mktemp("separate") / "run", settings, cache)


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """The network without batch norm that the runs have."""
    monkeypatch.setitem(CONVNETS, "plain", plain_net)


@pytest.fixture
def copied(tmp_path):
    """A copy of a run, to be changed."""

    def copy(out: Path) -> Path:
        return Path(shutil.copytree(out, tmp_path / "copied"))

    return copy


def valid_logits(path: Path):
    """Logits and targets of the validation split, from the saved model."""
    found = RunDirectory(path)
    recipe = recipe_of(found)
    task, model = find_task(recipe.task)(recipe), load_model(found)
    parts = list(task.logits(model, "valid", Accelerator(cpu=True)))
    return torch.cat([z for z, _ in parts]), torch.cat([y for _, y in parts])


def read_records(path: Path) -> list[dict]:
    lines = (path / "records" / "test.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


# ------------------------------------------------------------------ fitting


@pytest.mark.parametrize("kind", ["images", "text"])
def test_the_temperature_is_fitted_on_validation_and_stored_with_the_model(kind, request, copied):
    path = copied(request.getfixturevalue(kind))
    found = calibrate_run(path)
    logits, target = valid_logits(path)
    fit = fit_temperature(logits, target)
    assert found.temperature == pytest.approx(fit.temperature, rel=1e-6)
    assert found.targets == len(target)
    before, after = (F.cross_entropy(logits / t, target).item() for t in (1, found.temperature))
    assert found.nll_before == pytest.approx(before, rel=1e-5)
    assert found.nll_after == pytest.approx(after, rel=1e-5)
    assert after < before
    results = json.loads((path / "results.json").read_text())
    assert found.nll_before == pytest.approx(results["valid"]["nll"], rel=1e-5)
    assert read_calibration(path / "best") == found
    stored = json.loads((path / "best" / "calibration.json").read_text())
    assert stored["split"] == "valid"
    assert not stored["folded"]
    assert stored["data"] in results["signature"]
    assert stored["made_with"]["torch"] == torch.__version__
    assert divisor_of(path / "best") == found.temperature
    assert calibrate_run(path) == found


def test_logits_are_computed_once_if_they_are_few_and_each_time_if_not(monkeypatch):
    passes = []

    def compute():
        passes.append(1)
        yield torch.arange(3.0), torch.tensor(0)
        yield torch.arange(3.0) + 1, torch.tensor(1)

    few = _Replayed(compute)
    first, second = list(few()), list(few())
    assert len(passes) == 1
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, second, strict=True))
    monkeypatch.setattr(_Replayed, "_KEPT", 5)
    many = _Replayed(compute)
    assert len(list(many())) == len(list(many())) == 2
    assert len(passes) == 3


def test_two_processes_fit_what_one_does_and_one_prints_it(images, copied):
    path = copied(images)
    alone = calibrate_run(path)
    log = path.with_suffix(".log")
    assert run(["calibrate", str(path)], log, world=2) == {0}, log.read_text()
    together = read_calibration(path / "best")
    assert together.temperature == pytest.approx(alone.temperature, rel=1e-6)
    assert together.targets == alone.targets
    line = f"T = {together.temperature:.4f}, fitted on {together.targets} targets of valid: NLL "
    line += f"{together.nll_before:.4f} -> {together.nll_after:.4f}"
    assert log.read_text().count(line) == 1


# ------------------------------------------------------------------ folding


@pytest.mark.parametrize("kind", ["images", "text", "separate"])
def test_a_folded_model_is_calibrated_for_everyone(kind, request, copied):
    path = copied(request.getfixturevalue(kind))
    before, target = valid_logits(path)
    found = calibrate_run(path, fold=True)
    assert found.folded
    after, _ = valid_logits(path)
    torch.testing.assert_close(after.softmax(-1), (before / found.temperature).softmax(-1))
    assert divisor_of(path / "best") == 1.0
    again = fit_temperature(after, target)
    assert again.temperature == pytest.approx(1, abs=1e-4)
    for fold in (False, True):
        with pytest.raises(RequestError, match="is folded into the model already"):
            calibrate_run(path, fold=fold)


def test_a_folded_translator_is_a_plain_folder_of_the_same_size(text, copied):
    path = copied(text)
    size = (path / "best" / "model.safetensors").stat().st_size
    before = AutoModelForSeq2SeqLM.from_pretrained(path / "best").eval()
    found = calibrate_run(path, fold=True)
    after = AutoModelForSeq2SeqLM.from_pretrained(path / "best").eval()
    assert (path / "best" / "model.safetensors").stat().st_size == size
    tokens = torch.tensor([[5, 9, 7, 2]])
    logits = [model(input_ids=tokens, decoder_input_ids=tokens).logits for model in (before, after)]
    expected = (logits[0] / found.temperature).softmax(-1)
    torch.testing.assert_close(logits[1].softmax(-1), expected)


# ------------------------------------------------------------------ who uses it


def test_images_are_evaluated_with_it(images, copied):
    path = copied(images)
    plain = evaluate_run(path, ("test",))["test"]
    assert "calibrated_nll" not in plain
    records = read_records(path)
    found = calibrate_run(path)
    scores = evaluate_run(path, ("test",))["test"]
    assert {name: scores[name] for name in plain} == plain
    p = torch.tensor([record["probabilities"] for record in records])
    labels = torch.tensor([record["label"] for record in records])
    nll = F.cross_entropy(p.log() / found.temperature, labels).item()
    assert scores["calibrated_nll"] == pytest.approx(nll, rel=1e-4)
    assert scores["calibrated_nll"] < scores["nll"]
    assert 0 <= scores["calibrated_ece"] <= 1
    assert read_records(path) == records


def test_translation_is_evaluated_with_it(text, copied):
    path = copied(text)
    fitted = evaluate_run(path, ("test",))["test"]  # fits one of its own
    records = read_records(path)
    found = calibrate_run(path)
    assert records[0]["forced"]["tempered"]["temperature"] == pytest.approx(found.temperature)
    # Another temperature than the fitted one shows who is asked.
    file = path / "best" / "calibration.json"
    file.write_text(json.dumps(sealed(json.loads(file.read_text()) | {"temperature": 0.25})))
    scores = evaluate_run(path, ("test",))["test"]
    after = read_records(path)
    for one, other in zip(records, after, strict=True):
        tempered = other["forced"].pop("tempered")
        assert tempered["temperature"] == 0.25
        one["forced"].pop("tempered")
        assert one == other
    assert scores.pop("calibrated_nll") > fitted.pop("calibrated_nll")
    assert scores == fitted


def test_translate_prints_calibrated_probabilities_and_searches_as_before(text, copied):
    path = copied(text)
    lines = ["3. Mai 2021", "Montag"]

    def translations():
        target = io.BytesIO()
        translate_stream(path, io.BytesIO("\n".join(lines).encode()), target, scores=True)
        return [json.loads(line) for line in target.getvalue().splitlines()]

    plain, model = translations(), Translator(path).model
    found = calibrate_run(path)
    calibrated = translations()
    for one, other in zip(plain, calibrated, strict=True):
        for name in ("text", "score", "tokens"):
            assert one[name] == other[name]
    translator = Translator(path)
    ids = translator.tokenizer(lines[0], return_tensors="pt").input_ids
    tokens = translator.target_tokenizer.convert_tokens_to_ids(calibrated[0]["tokens"])
    prefix = torch.tensor([[2, *tokens[:-1]]])
    with torch.no_grad():
        logits = model(input_ids=ids, decoder_input_ids=prefix).logits[0]
    p = (logits / found.temperature).softmax(-1)[torch.arange(len(tokens)), tokens]
    assert calibrated[0]["probabilities"] == pytest.approx(p.tolist(), rel=1e-4)
    calibrate_run(path, fold=True)
    assert ModelFolder(path).temperature == 1.0


def test_it_goes_with_a_copy_of_the_model_folder_and_with_an_export(text, copied, tmp_path):
    path = copied(text)
    found = calibrate_run(path)
    folder = shutil.copytree(path / "best", tmp_path / "elsewhere")
    assert ModelFolder(folder).temperature == found.temperature
    export(folder, tmp_path / "exported")
    facts = json.loads((tmp_path / "exported" / "labo.json").read_text())
    assert facts["temperature"] == found.temperature


# ------------------------------------------------------------------ refusals


def test_a_run_that_is_not_finished(images, copied):
    path = copied(images)
    (path / "results.json").unlink()
    with pytest.raises(RequestError, match="is unfinished: the command that started it"):
        calibrate_run(path)


def test_no_temperature_is_best(images, copied, monkeypatch):
    path = copied(images)
    task = find_task("image_classification")
    always_right = [(torch.eye(10), torch.arange(10))]
    monkeypatch.setattr(task, "logits", lambda *_: iter(always_right))
    with pytest.raises(RequestError, match="valid split: no temperature is best: all 10 "):
        calibrate_run(path)
    assert not (path / "best" / "calibration.json").exists()


def test_a_file_that_does_not_fit_is_not_used(images, copied):
    path = copied(images)
    temperature = calibrate_run(path).temperature
    file = path / "best" / "calibration.json"
    document = json.loads(file.read_text())
    edited = document | {"temperature": 0.25}
    plain = {key: value for key, value in document.items() if key != "checksum"}
    changed = r"calibration\.json was changed after it was written"
    for content, problem in [
        ("[]", r"calibration\.json: .*: run `labo"),
        (
            json.dumps({**edited, "temperature": -1}),
            r"calibration\.json: temperature: .*: run `labo",
        ),
        (json.dumps(edited), changed),
        (json.dumps(plain), changed),
        (json.dumps(sealed(document | {"model": "0" * 64})), "belongs to another model than model"),
    ]:
        file.write_text(content)
        with pytest.raises(RequestError, match=problem):
            evaluate_run(path, ("test",))
    assert calibrate_run(path).temperature == temperature


# ------------------------------------------------------------------ a fold is another model


@pytest.mark.parametrize("number", [1, 3, 5])
def test_a_fold_that_was_killed_is_completed_with_the_right_temperature(
    number, images, copied, tmp_path
):
    path = copied(images)
    wanted = calibrate_run(path).temperature
    arguments, log = ["calibrate", str(path), "--fold"], tmp_path / "log"
    assert run(arguments, log, kill=("rename", number)) == {-signal.SIGKILL}
    run(arguments, log)  # refuses if the fold was done
    found = read_calibration(path / "best")
    assert found.folded
    assert found.temperature == pytest.approx(wanted, abs=1e-4)
    weights, folded = (
        load_file(folder / "best" / "model.safetensors") for folder in (images, path)
    )
    (head,) = [name for name in weights if not torch.equal(weights[name], folded[name])][:1]
    ratio = (weights[head] / folded[head]).nanmedian().item()
    assert ratio == pytest.approx(wanted, rel=1e-4)


def test_results_and_records_are_of_one_model(images, copied):
    path = copied(images)
    directory = RunDirectory(path)
    evaluate_run(path, ("valid", "test"))
    before = directory.results()
    found = calibrate_run(path, fold=True)
    assert directory.stale_splits() == ["valid", "test"]
    directory.write_records("test.jsonl", ["{}\n"])  # as if the evaluation had been killed here
    assert not (directory.records / "valid.jsonl").exists()
    assert "are of different models: labo evaluate" in str(read_run(path).state)
    scores = evaluate_run(path, ("test",))  # the other split is scored again too
    after = directory.results()
    assert {split: after[split] for split in ("valid", "test")} == scores
    for split in scores:
        assert after[split]["nll"] != before[split]["nll"]
        assert after[split]["accuracy"] == before[split]["accuracy"]
    assert after["signature"] == f"{before['signature']}|folded:{found.temperature:.6g}"
    assert directory.stale_splits() == []
    assert read_run(path).state.kind == "finished"
