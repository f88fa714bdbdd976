"""Analyses put together: the document of a run, runs beside each other, and ``labo analyze``."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import sacrebleu
import torch

from analysis_runs import drawn_images, image_records, sentence, write_lines, write_run
from command import labo
from labo.calibration import expected_calibration_error, fit_temperature
from labo.lab import analysis
from labo.lab.analysis import selective
from labo.lab.analysis.labels import TAUS
from labo.lab.analysis.run import analyze_run, analyze_runs, load_analysis, write_analysis
from labo.lab.analysis.views import underconfidence_interval
from labo.lab.errors import RequestError


def image_run(path, *, sharpness=1.0, size=150, noise=0, splits=("valid", "test"), **run):
    """A run that tells distributions with this sharpness, perhaps with some of them shuffled."""
    write_run(path, **{"method": {"name": "base"}, **run})
    for place, split in enumerate(splits):
        p, labels = drawn_images(size, 3, sharpness=sharpness, seed=place)
        p[:noise] = np.roll(p[:noise], 1, axis=-1)
        write_lines(path / "records" / f"{split}.jsonl", image_records(p, labels))
    return path


TEXTS = [
    "one two three four five six",
    "seven eight nine ten one two",
    "three four five six seven eight",
    "nine ten one two three four",
    "five six seven eight nine ten",
    "ten nine eight seven six five",
]


def outputs(wrong):
    """The texts with the first words wrong."""
    return [" ".join(["zero"] * wrong + text.split()[wrong:]) for text in TEXTS]


def translation_run(path, *, wrong=1, p=0.5, **run):
    """A run that gets the first ``wrong`` words of every sentence wrong."""
    write_run(path, **{"task": "translation", "method": {"name": "ls", "alpha": 0.1}, **run})
    records = []
    for place, (text, output) in enumerate(zip(TEXTS, outputs(wrong), strict=True)):
        lengths = {"1": 7, "5": 7, "20": 7 - place % 2}
        records.append(sentence(text, output, p=p, frequency=100.0 - place, lengths=lengths))
    write_lines(path / "records" / "test.jsonl", records)
    return path


# ------------------------------------------------------------------ one run


def test_an_image_run(tmp_path):
    path = image_run(tmp_path / "r", sharpness=2.0, method={"name": "labo", "rho": 0.5})
    found = analyze_run(path)
    json.dumps(found, allow_nan=False)
    assert set(found["splits"]) == {"valid", "test"}
    test = found["splits"]["test"]
    p, labels = drawn_images(150, 3, sharpness=2.0, seed=1)
    before, after = test["views"]["before"], test["views"]["after"]
    logits, target = torch.from_numpy(np.log(p)), torch.from_numpy(labels)
    assert before["ece"] == pytest.approx(expected_calibration_error(logits, target))
    assert before["nll"] == pytest.approx(-np.log(p[np.arange(150), labels]).mean())
    assert before["accuracy"] == after["accuracy"] == (p.argmax(-1) == labels).mean()
    assert before["selective"]["aurc"] == selective.aurc(p.max(-1), p.argmax(-1) == labels)
    # Overconfident by construction; the temperature is fitted on the validation records.
    valid, valid_labels = drawn_images(150, 3, sharpness=2.0, seed=0)
    fit = fit_temperature(torch.from_numpy(np.log(valid)), torch.from_numpy(valid_labels))
    assert test["temperature"] == pytest.approx(fit.temperature)
    tempered = {"temperature": fit.temperature}
    assert after["ece"] == pytest.approx(expected_calibration_error(logits, target, **tempered))
    assert after["nll"] < before["nll"]
    assert abs(after["underconfidence"]) < abs(before["underconfidence"])
    assert test["verdict"].startswith("labo is overconfident by 0.")
    assert "after one temperature, T = " in test["verdict"]
    assert set(found["splits"]["valid"]["views"]) == {"before"}
    assert found["training"]["alpha"] == pytest.approx([1 - 0.25 / math.log(3)])
    assert found["notes"] == []


def loud_images(size, seed):
    """Distributions whose margin tells hits, but half of the logits are loud; and labels."""
    random = np.random.default_rng(seed)
    margin, loud = random.random(size), np.where(random.random(size) < 0.5, 6, 0.7)
    logits = np.stack([1 + margin, 1 - margin, np.full(size, -2.0)], -1) * loud[:, None]
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return p, np.where(random.random(size) < 0.5 + 0.5 * margin, 0, 1)


def ranked_area(score, right):
    """AURC by its definition; no two scores are equal."""
    errors = ~right[np.argsort(-score)]
    return np.mean([errors[: n + 1].mean() for n in range(len(errors))])


def test_the_area_after_logit_normalisation_is_shown(tmp_path, capsys):
    """From the records to the table: the p that is best on valid, applied to test."""
    path = write_run(tmp_path / "r", method={"name": "labo"})
    scores, right, plain = {}, {}, {}
    for seed, split in enumerate(("valid", "test")):
        p, labels = loud_images(300, seed)
        write_lines(path / "records" / f"{split}.jsonl", image_records(p, labels))
        z = np.log(p) - np.log(p).mean(-1, keepdims=True)
        scores[split] = [z.max(-1) / np.linalg.norm(z, ord=n, axis=-1) for n in range(1, 11)]
        right[split], plain[split] = p.argmax(-1) == labels, p.max(-1)
    areas = [ranked_area(score, right["valid"]) for score in scores["valid"]]
    best = int(np.argmin(areas))
    assert areas[best] < ranked_area(plain["valid"], right["valid"])
    before, expected = (
        ranked_area(score, right["test"]) for score in (plain["test"], scores["test"][best])
    )
    assert expected < before
    found = analyze_run(path)["splits"]
    assert found["test"]["logit_norm"] == {"p": best + 1, "aurc": pytest.approx(expected)}
    assert found["valid"]["logit_norm"] is None
    status, printed, _ = labo(capsys, "analyze", path)
    assert status == 0
    assert (
        f"; ranking by logits divided by their {best + 1}-norm changes its AURC from {before:.4f} "
        f"to {expected:.4f}\n"
    ) in printed
    heads, _, cells = (line.split("|") for line in printed.splitlines() if line.startswith("|"))
    column = [head.strip() for head in heads].index("AURC, normalised logits")
    assert cells[column].strip() == f"{expected:.4f}"


def test_without_validation_records_no_temperature_is_fitted(tmp_path):
    found = analyze_run(image_run(tmp_path / "r", splits=("test",)))
    assert found["splits"]["test"]["temperature"] is None
    assert set(found["splits"]["test"]["views"]) == {"before"}
    assert found["notes"] == ["no temperature is fitted: there are no records of the valid split"]


def test_all_right_on_the_validation_split(tmp_path):
    path = image_run(tmp_path / "r", splits=("test",))
    records = image_records(np.array([[0.8, 0.1, 0.1]] * 4), np.zeros(4, dtype=int))
    write_lines(path / "records" / "valid.jsonl", records)
    found = analyze_run(path)
    assert found["splits"]["test"]["temperature"] is None
    assert found["splits"]["valid"]["views"]["before"]["confidence_on_errors"] is None
    assert found["notes"] == [
        "valid split: no temperature is best: all 4 predictions are right, so that the NLL falls "
        "towards 0 as T does; fit on data with errors"
    ]


def test_a_run_without_records_has_its_curves(tmp_path):
    path = write_run(tmp_path / "r")
    (path / "results.json").unlink()
    found = analyze_run(path)
    assert found["splits"] == {}
    assert found["training"]["valid"]["nll"] == [1.0]
    assert found["notes"] == [f"there are no records: labo evaluate {path} writes them"]


def test_figure_1c_of_the_examples(tmp_path):
    path = image_run(tmp_path / "r", method={"name": "labo", "tau": 1.15, "alpha": 0.3})
    example = {"title": "t", "target": 1, "logits": [2.0, 1.0, 0.0], "image": None, "context": "c"}
    content = {"classes": ["a", "b", "c"], "examples": [example]}
    (path / "records" / "examples.json").write_text(json.dumps(content))
    (label,) = analyze_run(path)["labels"]
    assert (label["title"], label["context"]) == ("t", "c")
    assert (label["alpha"], label["tau"], label["rho"]) == (0.3, 1.15, None)
    assert label["classes"] == ["a", "b", "c"]
    optimal = label["sliders"]["optimal"][TAUS.index(1.15)]
    assert label["labo"][1] == pytest.approx(0.7 + 0.3 * optimal[1], abs=1e-6)


def test_a_translation_run(tmp_path):
    found = analyze_run(translation_run(tmp_path / "r", wrong=2, p=0.4))
    json.dumps(found, allow_nan=False)
    test = found["splits"]["test"]
    assert test["bleu"] == pytest.approx(sacrebleu.corpus_bleu(outputs(2), [TEXTS]).score)
    decoded, forced = test["views"]["decoded"], test["views"]["forced"]
    assert sum(decoded["reliability"]["count"]) == sum(forced["reliability"]["count"]) == 6 * 7
    assert decoded["accuracy"] == pytest.approx(5 / 7)
    assert decoded["underconfidence"] == pytest.approx(5 / 7 - 0.4)
    assert decoded["nll"] is None
    assert forced["accuracy"] == 1.0
    assert forced["nll"] == pytest.approx(-math.log(0.4))
    parts = test["frequency"]
    assert parts["most"]["examples"] == 2
    assert parts["most"]["mean_frequency"] == 99.5
    assert test["confidence"]["peak"]["least"] == 0.425
    assert test["lengths"]["beams"]["20"]["ratio"] == pytest.approx(39 / 42)
    assert test["verdict"] == (
        "ls: given the reference so far it is underconfident by 0.600; "
        "on its own output it is underconfident by 0.314"
    )
    assert len(found["notes"]) == 1
    assert found["notes"][0].startswith("the records have no temperature")


def test_what_one_temperature_does_to_a_translation_run(tmp_path):
    path = write_run(tmp_path / "r", task="translation")
    for split in ("test", "valid"):
        records = [sentence("a b c", p=0.4, tempered=0.9) for _ in range(2)]
        write_lines(path / "records" / f"{split}.jsonl", records)
    found = analyze_run(path)["splits"]
    assert found["test"]["temperature"] == 0.25
    after = found["test"]["views"]["forced_after"]
    assert after["underconfidence"] == pytest.approx(0.1)
    assert after["nll"] == pytest.approx(-math.log(0.9))
    assert found["test"]["verdict"].endswith(
        "after one temperature, given the reference so far, it is underconfident by 0.100"
    )
    assert found["valid"]["temperature"] is None
    assert "forced_after" not in found["valid"]["views"]


def test_the_interval_of_tokens_is_drawn_by_the_sentence(tmp_path):
    path = write_run(tmp_path / "r", task="translation")
    records = [sentence("a b c", text) for text in ["x y z", "a b c"] * 4]
    write_lines(path / "records" / "test.jsonl", records)
    right = np.array([False, False, False, True, True, True, True, True] * 4)
    expected = underconfidence_interval(np.full(32, 0.5), right, np.repeat(np.arange(8), 4))
    view = analyze_run(path)["splits"]["test"]["views"]["decoded"]
    assert view["underconfidence_interval"] == expected
    assert expected[1] - expected[0] > 0.4


def test_slices_may_be_empty(tmp_path):
    path = translation_run(tmp_path / "r")
    parts = analyze_run(path, part_size=4)["splits"]["test"]["frequency"]
    assert [parts[part]["examples"] for part in ("most", "medium", "least")] == [4, 2, 0]
    assert parts["least"] == {"examples": 0, "mean_frequency": None, "bleu": None}


def test_an_output_without_a_token(tmp_path):
    path = write_run(tmp_path / "r", task="translation")
    empty = sentence("a b", "", tokens=[], probabilities=[])
    write_lines(path / "records" / "test.jsonl", [empty])
    found = analyze_run(path)
    assert set(found["splits"]["test"]["views"]) == {"forced"}
    assert found["splits"]["test"]["lengths"] is None
    assert "the test records have no decoded tokens" in found["notes"]
    assert any("no output lengths by beam size" in note for note in found["notes"])


def test_requests_that_cannot_be_met(tmp_path):
    path = write_run(tmp_path / "r")
    with pytest.raises(RequestError, match="has no records of the test split"):
        analyze_run(path, ["test"])
    with pytest.raises(RequestError, match="unknown task 'speech'"):
        analyze_run(write_run(tmp_path / "s", task="speech"))
    with pytest.raises(RequestError, match="image_classification has no option part_size"):
        analyze_run(image_run(tmp_path / "i"), part_size=3)


# ------------------------------------------------------------------ the file


def test_an_analysis_is_read_as_long_as_it_fits(tmp_path, monkeypatch):
    path = image_run(tmp_path / "r")
    written = write_analysis(path)
    assert json.loads((path / "analysis.json").read_text()) == written
    with monkeypatch.context() as patched:
        patched.setattr(analysis.run, "analyze_run", None)
        assert load_analysis(path) == written
    write_lines(path / "records" / "test.jsonl", image_records(*drawn_images(9, 3)))
    assert load_analysis(path)["splits"]["test"]["examples"] == 9


def test_a_file_that_does_not_fit_is_made_anew(tmp_path):
    path = image_run(tmp_path / "r")
    written = write_analysis(path)
    changed = {**written, "splits": {"valid": {}, "test": {"views": 3}}}  # by hand
    damaged = ["", "[]", '{"format": 0}', '{"format": 4, "inputs": {}}', "[" * 100_000]
    for content in [*damaged, json.dumps(changed)]:
        (path / "analysis.json").write_text(content)
        assert load_analysis(path) == written
    write_analysis(path, ["test"])  # one split is not the whole
    assert load_analysis(path) == written


# ------------------------------------------------------------------ several runs


def test_seeds_make_a_method_and_methods_are_compared(tmp_path):
    paths = []
    for seed, (ours, theirs) in enumerate([(0, 40), (5, 30), (2, 50)]):
        paths.append(
            image_run(tmp_path / f"labo-{seed}", noise=ours, seed=seed, method={"name": "labo"})
        )
        paths.append(
            image_run(tmp_path / f"ls-{seed}", noise=theirs, seed=seed, method={"name": "ls"})
        )
    (group,) = analyze_runs(paths)["groups"]
    assert group["references"] == ["ls"]
    assert [row["method"] for row in group["methods"]] == ["labo", "ls"]
    labo, ls = (row["measures"]["accuracy"] for row in group["methods"])
    assert group["methods"][0]["seeds"] == [0, 1, 2]
    assert labo["mean"] == pytest.approx(np.mean(labo["values"]))
    assert labo["std"] == pytest.approx(np.std(labo["values"], ddof=1))
    (difference,) = group["differences"]
    assert (difference["method"], difference["reference"]) == ("labo", "ls")
    assert difference["values"] == pytest.approx(np.subtract(labo["values"], ls["values"]))
    assert "frequency" not in group


def test_runs_on_different_examples_are_not_compared(tmp_path):
    a, b = image_run(tmp_path / "a"), image_run(tmp_path / "b", size=40)
    c, d = translation_run(tmp_path / "c"), write_run(tmp_path / "d")
    found = analyze_runs([a, b, c, d])
    assert [group["runs"] for group in found["groups"]] == [["a"], ["b"], ["c"]]
    assert found["notes"] == ["d is not compared: it has no records of the test split"]


def test_translations_are_compared_part_by_part(tmp_path):
    ls = [translation_run(tmp_path / f"ls-{s}", wrong=2, p=0.9, seed=s) for s in (0, 1)]
    labo = [
        translation_run(tmp_path / f"labo-{s}", wrong=s, p=p, seed=s, method={"name": "labo"})
        for s, p in enumerate((0.4, 0.6))
    ]
    (group,) = analyze_runs([*ls, *labo])["groups"]
    assert (group["metric"], group["references"]) == ("bleu", ["ls"])
    frequency = group["frequency"]
    assert frequency["sizes"] == {"most": 2, "medium": 2, "least": 2}
    row = {row["method"]: row for row in frequency["rows"]}
    assert row["ls"]["differences"] == {}
    scores = [sacrebleu.corpus_bleu(outputs(wrong)[:2], [TEXTS[:2]]).score for wrong in (0, 1)]
    assert row["labo"]["bleu"]["most"] == pytest.approx(np.mean(scores))
    assert row["labo"]["differences"]["ls"]["most"] == pytest.approx(
        row["labo"]["bleu"]["most"] - row["ls"]["bleu"]["most"]
    )


# ------------------------------------------------------------------ the command


def test_the_command_writes_files_and_prints_tables(tmp_path, capsys):
    paths = [
        translation_run(tmp_path / f"{name}-{seed}", wrong=wrong, seed=seed, method={"name": name})
        for name, wrong in (("ls", 2), ("labo", 1))
        for seed in (0, 1)
    ]
    status, printed, _ = labo(capsys, "analyze", *paths, "part_size=1")
    assert status == 0
    for path in paths:
        document = json.loads((path / "analysis.json").read_text())
        assert f"{path.name}: {document['splits']['test']['verdict']}\n" in printed
    assert "test, 6 examples\n" in printed
    assert "differences\n" in printed
    assert "| labo - ls |" in printed
    assert "- slices of 1 by token frequency: most 1 (mean count 100)" in printed
    assert "- 3 sentences are in no part" in printed
    assert printed.count("note: the records have no temperature") == 1


def test_wrong_requests_are_one_line_and_status_2(tmp_path, capsys):
    run = image_run(tmp_path / "r")
    for arguments, line in [
        (
            [tmp_path / "nowhere"],
            f"labo: {tmp_path / 'nowhere'} is not a run: it has no recipe.yaml\n",
        ),
        (
            [run, "part_size=3"],
            "labo: part_size=3: image_classification has no such option for labo analyze "
            "(it has none)\n",
        ),
    ]:
        assert labo(capsys, "analyze", *arguments) == (2, "", line)
    assert not (run / "analysis.json").exists()


def test_a_broken_run_is_named_and_the_others_are_analysed(tmp_path, capsys):
    ls, ours = (image_run(tmp_path / name, method={"name": name}) for name in ("ls", "labo"))
    torn = image_run(tmp_path / "torn", method={"name": "base"})
    (torn / "results.json").write_text('{"test": 3}')
    spoilt = image_run(tmp_path / "spoilt", method={"name": "kd"})
    (spoilt / "records" / "test.jsonl").write_text('{"label": 3}\n')
    with (ours / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\n{}\n")
    status, printed, _ = labo(capsys, "analyze", torn, ls, spoilt, tmp_path / "gone", ours)
    assert status == 0
    assert "| labo - ls |" in printed
    for reason in (
        f"{torn} is broken: {torn / 'results.json'}: test: should be a valid dictionary, got 3",
        f"{spoilt / 'records' / 'test.jsonl'}, line 1: 'probabilities' is missing",
        f"{tmp_path / 'gone'} is not a run: it has no recipe.yaml",
    ):
        assert printed.count(f"note: left out: {reason}\n") == 1
    assert f"note: labo: {ours / 'metrics.jsonl'}: line 3, 4 left out" in printed
