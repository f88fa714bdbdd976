"""Compare, analyze, report and calibrate for runs of language models."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lab_runs import log_of, run
from labo.lab.analysis.reading import read_run
from labo.lab.analysis.run import analyze_run, analyze_runs
from labo.lab.calibrate import calibrate_run
from labo.lab.errors import RequestError
from labo.lab.evaluate import evaluate_run
from labo.lab.language_modeling.analysis import ANALYSIS
from labo.lab.language_modeling.documents import RawDocument
from labo.lab.language_modeling.model import LanguageModel, causal_config, fresh_model
from labo.lab.language_modeling.score import Scorer
from tiny_corpus import labo
from tiny_language import prepare_texts


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("analysed")
    prepare_texts(folder / "data", vocabulary=290, holdout=4, holdout_test=5)
    settings = ["data.name=prepared", f"data.path={folder / 'data'}", "data.block=24"]
    settings += ["train.batch_tokens=96", "train.epochs=2", "data.recorded_tokens=60"]
    settings += ["model.width=16", "model.layers=1", "model.heads=2", "optim.warmup_steps=1"]
    made = {}
    for method in ("base", "ls"):
        out = folder / method
        arguments = ["train", "lm-manual", *settings, f"method={method}", "--out", str(out)]
        assert run(arguments, log_of(out)) == {0}, log_of(out).read_text()
        evaluate_run(out, ["valid", "test"])
        made[method] = out
    return made


def test_scores_of_all_documents_are_those_of_the_run(runs):
    document = analyze_run(runs["base"])
    results = json.loads((runs["base"] / "results.json").read_text())["test"]
    split = document["splits"]["test"]
    for name in ("bits_per_byte", "nll"):
        assert split[name] == pytest.approx(results[name], rel=1e-6)
    measured = ANALYSIS.measure(split)
    assert next(iter(measured)) == ANALYSIS.headline.key == "bits_per_byte"
    assert measured["perplexity"] == pytest.approx(results["perplexity"], rel=1e-6)
    assert split["views"].keys() == {"forced", "forced_after"}
    recorded = sum(split["views"]["forced"]["reliability"]["count"])
    assert 0 < recorded <= 60 < split["tokens"]
    assert split["temperature"] > 0
    assert any("data.recorded_tokens" in note for note in document["notes"])


def test_the_bootstrap_draws_documents(runs):
    read = read_run(runs["base"])
    records = ANALYSIS.read_records(read, "test")
    scores = ANALYSIS.bootstrap_scores(read, records)
    nll, size = (sum(getattr(d, name) for d in records.used) for name in ("nll", "bytes"))
    assert scores[0] == pytest.approx(nll / math.log(2) / size)
    alone = [d.nll / math.log(2) / d.bytes for d in records.used]
    assert scores.shape == (1001,)
    assert min(alone) <= scores.min() < scores[0] < scores.max() <= max(alone)


def test_runs_are_compared_and_reported(runs, tmp_path, capsys):
    (group,) = analyze_runs(list(runs.values()))["groups"]
    assert group["metric"] == "bits_per_byte"
    difference = next(d for d in group["differences"] if d["method"] == "ls")
    results = [json.loads((p / "results.json").read_text())["test"] for p in runs.values()]
    expected = results[1]["bits_per_byte"] - results[0]["bits_per_byte"]
    assert difference["mean"] == pytest.approx(expected, rel=1e-4, abs=1e-9)
    assert difference["p_bootstrap"] is not None
    page = tmp_path / "report.html"
    assert labo("report", *runs.values(), "-o", page) == 0
    text = page.read_text()
    assert "bits per byte" in text
    assert "Reliability" in text


def test_damaged_records_are_refused(runs, tmp_path):
    copy = tmp_path / "run"
    (copy / "records").mkdir(parents=True)
    for name in ("recipe.yaml", "results.json"):
        (copy / name).write_text((runs["base"] / name).read_text())
    lines = (runs["base"] / "records" / "test.jsonl").read_text().splitlines()
    broken = {**json.loads(lines[0]), "bytes": 0}
    (copy / "records" / "test.jsonl").write_text(json.dumps(broken) + "\n")
    with pytest.raises(RequestError, match="tokens without bytes"):
        ANALYSIS.read_records(read_run(copy), "test")


@pytest.mark.parametrize("preset", ["gpt2-tiny", "llama-tiny"])
def test_a_folded_temperature_divides_the_logits_and_no_more(preset, tmp_path):
    torch.manual_seed(0)
    model = fresh_model(causal_config(preset, 40, positions=16)).eval()
    ids, positions = torch.tensor([[5, 6, 7]]), torch.arange(3)[None]
    with torch.no_grad():
        before = model(ids, positions)
        expected = before.logits(before.states) / 2.5
        model.fold_temperature(2.5)
        after = model(ids, positions)
    torch.testing.assert_close(after.states, before.states)
    torch.testing.assert_close(after.logits(after.states), expected)
    saved = model.plain_weights(model.state_dict())
    model.causal.save_pretrained(tmp_path, state_dict=saved)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, expected)
        again = LanguageModel(loaded)(ids, positions)
        torch.testing.assert_close(again.logits(again.states), expected)


def test_a_calibrated_run_scores_alike_with_its_temperature_folded_in_or_not(runs):
    texts = [RawDocument.of_text("", "the dog sees the owl")]
    plain = Scorer(runs["ls"]).score(texts)[0]
    calibration = calibrate_run(runs["ls"])
    assert calibration.nll_after < calibration.nll_before
    stored = Scorer(runs["ls"]).score(texts)[0]
    assert stored.log_probability != pytest.approx(plain.log_probability, rel=1e-3)
    assert calibrate_run(runs["ls"], fold=True).folded
    folded = Scorer(runs["ls"]).score(texts)[0]
    np.testing.assert_allclose(folded.log_probabilities, stored.log_probabilities, rtol=1e-4)
