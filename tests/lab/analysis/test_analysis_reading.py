"""Reading run directories: finished, unfinished, broken; and records, right and wrong."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from analysis_runs import drawn_images, image_records, sentence, write_lines, write_run
from labo.lab.analysis import reading
from labo.lab.analysis.task import find_analysis
from labo.lab.errors import RequestError
from labo.lab.translation.analysis import read_translations

IMAGES = find_analysis("image_classification")


def test_a_finished_run(tmp_path):
    run = reading.read_run(write_run(tmp_path / "r", method={"name": "ls", "alpha": 0.1}, seed=3))
    assert str(run.state) == "finished"
    assert run.state.step == 10
    assert (run.name, run.task, run.seed) == ("r", "image_classification", 3)
    assert run.method == {"name": "ls", "alpha": 0.1}
    assert run.num_classes == 3
    assert "made_with" not in run.recipe
    assert run.splits() == []


def test_an_unfinished_run_says_how_far_it_came(tmp_path):
    path = write_run(tmp_path / "r")
    (path / "results.json").unlink()
    assert str(reading.read_run(path).state) == (
        "unfinished at step 10: the command that started it continues it"
    )
    (path / "metrics.jsonl").unlink()
    assert str(reading.read_run(path).state) == (
        "unfinished at step 0: the command that started it continues it"
    )


def test_the_line_that_was_being_written_is_left_out(tmp_path):
    path = write_run(tmp_path / "r")
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 15, "epo')
    run = reading.read_run(path)
    assert run.state.kind == "finished"
    assert [line["step"] for line in run.metrics] == [5, 10]


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("results.json", '{"valid": ', "results.json: not JSON"),
        ("results.json", "[" * 100_000, "results.json: not JSON"),
        ("results.json", "[]", "results.json: not a JSON object"),
        ("results.json", '{"test": 3}', "results.json: test: should be a valid dictionary, got 3"),
        (
            "results.json",
            '{"test": {"accuracy": "high"}}',
            "results.json: test.accuracy: should be a valid number, got 'high'",
        ),
        ("results.json", '{"test": {"accuracy": NaN}}', "test.accuracy: should be a finite number"),
        ("best/config.json", "", "config.json: not JSON"),
        ("best/config.json", '{"labo": {"num_classes": 0}}', "config.json: labo.num_classes"),
        ("recipe.yaml", "task: [", "recipe.yaml"),
        ("recipe.yaml", "seed: 1", "recipe.yaml: task: missing"),
        ("recipe.yaml", "task: t\nmethod: {alpha: 1}", "recipe.yaml: method.name: missing"),
    ],
)
def test_a_broken_run_says_why(tmp_path, file, content, reason):
    path = write_run(tmp_path / "r")
    (path / file).write_text(content)
    state = reading.read_run(path).state
    assert str(state).startswith("broken: ")
    assert reason in state.reason
    with pytest.raises(RequestError, match="r is broken: "):
        reading.sound_run(path)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"st', "not JSON"),
        (b'{"step": 7, "note": "\xff\xfe"}', "not JSON"),
        (b"{}", "step: missing"),
        (b"[]", "not a JSON object"),
        (b'{"step": 7, "valid": {"nll": "low"}}', "valid.nll: should be a valid number"),
    ],
)
def test_a_wrong_line_of_metrics_is_named_and_nothing_else_is_lost(tmp_path, line, reason):
    path = write_run(tmp_path / "r")
    file = path / "metrics.jsonl"
    first, second = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([first, line, second, b""]))
    run = reading.read_run(path)
    assert str(run.state) == "finished"
    assert run.state.step == 10
    assert [found["step"] for found in run.metrics] == [5, 10]
    (problem,) = run.problems
    assert problem.startswith(f"{file}: line 2 left out ({reason}")


def test_many_wrong_lines_of_metrics_are_one_sentence(tmp_path):
    path = write_run(tmp_path / "r")
    (path / "metrics.jsonl").write_text("{}\n" * 100 + '{"step": 3}\n')
    run = reading.read_run(path)
    assert [found["step"] for found in run.metrics] == [3]
    assert run.problems == [
        f"{path / 'metrics.jsonl'}: line 1, 2, 3, 4, 5, ... left out (step: missing)"
    ]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[]", "conditions.json: not a JSON object"),
        ('{"launches": [{"jobs": 2}]}', "conditions.json: launches.0: missing"),
    ],
)
def test_wrong_conditions_are_one_clear_line(tmp_path, content, problem):
    assert reading.read_conditions(tmp_path) == []
    (tmp_path / "conditions.json").write_text(content)
    with pytest.raises(RequestError) as error:
        reading.read_conditions(tmp_path)
    assert problem in str(error.value)


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(RequestError, match=r"is not a run: it has no recipe\.yaml"):
        reading.read_run(tmp_path)


# ------------------------------------------------------------------ images


def with_records(tmp_path, records, **run):
    path = write_run(tmp_path / "r", **run)
    write_lines(path / "records" / "test.jsonl", records)
    return reading.read_run(path)


def test_image_records_become_arrays(tmp_path):
    p, labels = drawn_images(20, 3)
    run = with_records(tmp_path, image_records(p, labels))
    assert run.splits() == ["test"]
    images = IMAGES.read_records(run, "test")
    np.testing.assert_allclose(images.probabilities, p)
    assert images.labels.tolist() == labels.tolist()
    assert images.right.tolist() == (p.argmax(-1) == labels).tolist()


def test_missing_records_say_how_to_get_them(tmp_path):
    run = reading.read_run(write_run(tmp_path / "r"))
    with pytest.raises(RequestError) as error:
        IMAGES.read_records(run, "test")
    assert str(error.value) == (
        f"{run.path} has no records of the test split: labo evaluate {run.path} writes them"
    )


GOOD = {"label": 1, "probabilities": [0.25, 0.75]}


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"label": 1}, "'probabilities' is missing"),
        ({**GOOD, "probabilities": "x"}, "'probabilities' is not a list of numbers"),
        ({**GOOD, "probabilities": [[1.0]]}, "'probabilities' has 1 values, expected 2"),
        ({**GOOD, "probabilities": [0.2, 0.3, 0.5]}, "'probabilities' has 3 values, expected 2"),
        ({**GOOD, "probabilities": [-0.5, 1.5]}, "'probabilities' has a value outside [0, 1]"),
        ({**GOOD, "probabilities": [math.nan, 1]}, "'probabilities' has a value outside [0, 1]"),
        ({**GOOD, "probabilities": [0.5, 0.4]}, "'probabilities' do not sum to 1"),
        ({**GOOD, "label": 2}, "'label' 2 is not one of the 2 classes"),
        ({**GOOD, "label": True}, "'label' is not a whole number"),
        ([1, 2], "not a record"),
    ],
)
def test_a_wrong_image_record_is_one_clear_line(tmp_path, wrong, problem):
    run = with_records(tmp_path, [GOOD, wrong])
    with pytest.raises(RequestError) as error:
        IMAGES.read_records(run, "test")
    assert str(error.value) == f"{run.records_file('test')}, line 2: {problem}"


@pytest.mark.parametrize("read", [IMAGES.read_records, read_translations])
def test_no_records_at_all(tmp_path, read):
    with pytest.raises(RequestError, match=r"test\.jsonl is empty"):
        read(with_records(tmp_path, []), "test")


# ------------------------------------------------------------------ translation


def test_translation_records(tmp_path):
    lengths = {"1": 5, "20": 4}
    records = [sentence(), sentence("a b", "a", p=0.25, frequency=3, lengths=lengths)]
    run = with_records(tmp_path, records, task="translation", num_classes=50)
    assert run.num_classes == 50
    found = read_translations(run, "test")
    assert len(found) == 2
    assert found.hypotheses == ["the cat sat down", "a"]
    assert found.references == ["the cat sat down", "a b"]
    assert found.frequency.tolist() == [10.0, 3.0]
    assert found[1].probabilities.tolist() == [0.25, 0.25]
    assert found[0].lengths == {}
    assert found[1].lengths == lengths
    assert found[1].forced.tokens == ["a", "b", "</s>"]


def forced(**fields):
    return {"forced": {**sentence()["forced"], **fields}}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"hypothesis": None}, ": 'hypothesis' is not a text"),
        ({"frequency": math.nan}, ": 'frequency' is nan"),
        ({"probabilities": [0.5]}, ": 'probabilities' has 1 values, expected 5"),
        ({"tokens": [1, 2]}, ": 'tokens' is not a list of texts"),
        ({"lengths": {"1": "long"}}, ", lengths: '1' is not a whole number"),
        (forced(right=[1, 1, 1, 1, 1]), ", forced: 'right' is not a list of 5 truth values"),
        (forced(confidence=[2.0] * 5), ", forced: 'confidence' has a value outside [0, 1]"),
        (forced(tempered={"temperature": 1.0}), ", forced, tempered: 'probabilities' is missing"),
    ],
)
def test_a_wrong_translation_record_is_one_clear_line(tmp_path, fields, problem):
    run = with_records(tmp_path, [{**sentence(), **fields}], task="translation")
    with pytest.raises(RequestError) as error:
        read_translations(run, "test")
    assert str(error.value) == f"{run.records_file('test')}, line 1{problem}"


# ------------------------------------------------------------------ examples


@pytest.mark.parametrize(
    ("example", "problem"),
    [
        ({"target": 0, "logits": [0, 1]}, "'title' is missing"),
        ({"title": "x", "target": 2, "logits": [0, 1]}, "'target' is not one of the 2 classes"),
        ({"title": "x", "target": 0, "logits": [0]}, "'logits' has 1 values, expected 2"),
    ],
)
def test_wrong_examples_are_one_clear_line(tmp_path, example, problem):
    path = write_run(tmp_path / "r")
    content = {"classes": ["a", "b"], "examples": [example]}
    (path / "records" / "examples.json").write_text(json.dumps(content))
    with pytest.raises(RequestError, match=rf"examples\.json, example 0: {problem}"):
        reading.read_examples(reading.read_run(path))
