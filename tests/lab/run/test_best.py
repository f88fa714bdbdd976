"""Nothing damaged is used silently: the selected model, the results, the records, the metrics."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import stat

import pytest
import torch

from lab_runs import BASE, log_of, metrics, outcome, run, train
from labo.lab.errors import RequestError
from labo.lab.run import checksums
from labo.lab.run.directory import RunDirectory, write_model


@pytest.fixture
def copy(base_run, tmp_path):
    return shutil.copytree(base_run, tmp_path / "run")


@pytest.fixture(scope="module")
def scored(base_run, tmp_path_factory):
    out = shutil.copytree(base_run, tmp_path_factory.mktemp("scored") / "run")
    assert evaluate(out)[0] == {0}
    return out


def flip(path, position=None):
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if position is None else position] ^= 1
    path.write_bytes(content)


def evaluate(out):
    log = out.with_suffix(".evaluate")
    return run(["evaluate", str(out)], log), log


def drop_checkpoints(out):
    shutil.rmtree(out / "checkpoints")
    (out / "checkpoints").mkdir()


def test_evaluation_agrees_with_training(scored):
    results = json.loads((scored / "results.json").read_text())
    log = scored.with_suffix(".evaluate").read_text()
    for split in ("valid", "test"):
        lines = (scored / "records" / f"{split}.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        assert [record["index"] for record in records] == list(range(len(records)))
        right = [record["label"] == record["prediction"] for record in records]
        assert sum(right) / len(right) == pytest.approx(results[split]["accuracy"], rel=1e-9)
        for record in records:
            assert record["confidence"] == max(record["probabilities"])
        assert f"{results[split]['nll']:.4f}" in log


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json", "all"])
def test_a_damaged_or_missing_best_is_written_again_from_the_checkpoint(name, copy, base_run):
    if name == "all":
        shutil.rmtree(copy / "best")
    else:
        flip(copy / "best" / name)
    codes, log = evaluate(copy)
    assert codes == {0}, log.read_text()
    assert "was written again from the checkpoint of step" in log.read_text()
    assert outcome(copy) == outcome(base_run)


def test_every_flipped_bit_of_the_weights_is_found(copy):
    drop_checkpoints(copy)
    weights = copy / "best" / "model.safetensors"
    whole = weights.read_bytes()
    chance = random.Random(0)
    for _ in range(50):
        flip(weights, chance.randrange(len(whole)))
        with pytest.raises(checksums.DamagedError, match=r"model\.safetensors is damaged"):
            RunDirectory(copy).verify_best()
        weights.write_bytes(whole)
    RunDirectory(copy).verify_best()


def test_a_damaged_best_without_a_checkpoint_says_how_to_go_on(copy):
    drop_checkpoints(copy)
    flip(copy / "best" / "model.safetensors")
    codes, log = evaluate(copy)
    assert codes == {2}
    assert "no checkpoint has the selected model of step" in log.read_text()
    assert "train the recipe again with another --out" in log.read_text()
    assert not (copy / "records").exists()


def test_a_damaged_teacher_is_refused(copy, tmp_path):
    flip(copy / "best" / "model.safetensors")
    out = tmp_path / "student"
    assert train(out, [*BASE, "method=kd", f"method.teacher={copy}"]) == {2}
    assert "model.safetensors is damaged" in log_of(out).read_text()
    assert not out.exists()


def test_a_run_whose_best_was_lost_can_be_continued(tmp_path, base_run):
    out = tmp_path / "run"
    assert train(out, BASE, kill=("step", 30)) == {-signal.SIGKILL}
    shutil.rmtree(out / "best")
    assert train(out, BASE) == {0}, log_of(out).read_text()
    assert outcome(out) == outcome(base_run)


@pytest.mark.parametrize("number", [2, 4, 6])
def test_a_model_is_whole_whenever_the_process_is_killed_as_it_is_selected(number, tmp_path):
    """Renames of the second selection: the old and the new model are both accepted."""
    out = tmp_path / "run"
    before = 1 + 4 + 8  # the recipe, the first selection, the first checkpoint
    kill = ("rename", before + number)
    assert train(out, BASE, kill=kill) == {-signal.SIGKILL}
    RunDirectory(out).verify_best()


def test_changed_results_are_refused(copy):
    path = copy / "results.json"
    path.write_text(path.read_text().replace('"accuracy": 0.', '"accuracy": 1.'))
    with pytest.raises(RequestError, match=r"results.json was changed after it was written"):
        RunDirectory(copy).results()
    path.unlink()  # as the message says
    assert train(copy, BASE) == {0}
    RunDirectory(copy).results()


def edit_results(out):
    path = out / "results.json"
    results = json.loads(path.read_text())
    results["test"]["accuracy"] = 0.999
    path.write_text(json.dumps(results))


def edit_records(out):
    path = out / "records" / "test.jsonl"
    path.write_text(path.read_text().replace('"prediction": 3', '"prediction": 4', 1))


def edit_recipe(out):
    path = out / "recipe.yaml"
    path.write_text(path.read_text().replace("batch_size: 64", "batch_size: 16"))


def add_records(out):
    path = out / "records" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]["test.jsonl"]
    path.write_text(json.dumps(manifest))


EDITS = {
    edit_results: "results.json was changed after it was written",
    edit_records: "test.jsonl is damaged (its checksum does not fit)",
    edit_recipe: "recipe.yaml is not the recipe of results.json",
    add_records: "test.jsonl: manifest.json does not list it",
}


@pytest.mark.parametrize("edit", EDITS)
def test_edited_numbers_are_not_reported(edit, scored, tmp_path):
    out = shutil.copytree(scored, tmp_path / "run")
    edit(out)
    for command in (["analyze"], ["report", "-o", str(tmp_path / "report.html")]):
        log = tmp_path / f"{command[0]}.log"
        assert run([*command, str(out)], log) == {2}
        assert EDITS[edit] in log.read_text()
    assert not (out / "analysis.json").exists()
    assert not (tmp_path / "report.html").exists()


def test_edited_numbers_are_not_compared(tmp_path):
    out, log = tmp_path / "runs", tmp_path / "log"
    options = ["train.epochs=1", "--methods", "base", "--seeds", "1", "--jobs", "1"]
    arguments = ["compare", "digits", *options, "--out", str(out)]
    assert run(arguments, log) == {0}, log.read_text()
    edit_results(next(out.glob("*-s0")))
    log.unlink()
    assert run(arguments, log) == {0}
    assert EDITS[edit_results] in log.read_text()
    assert "0.999" not in (out / "table.csv").read_text()


BROKEN = [b"{}", b"[]", b'{"step": "3"}', b"\xff\xfe", b'{"step": 3', b"", b"7", b"[" * 10_000]


def test_broken_lines_of_metrics_are_named_and_left_out(run_of, tmp_path):
    out, settings = tmp_path / "run", [*BASE, "train.log_every=1", "train.save_every=4"]
    assert train(out, settings, kill=("step", 14)) == {-signal.SIGKILL}
    path = out / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], *BROKEN, *lines[1:]]) + b'\n{"step": 14, "lo')
    assert train(out, settings) == {0}, log_of(out).read_text()
    named = [line for line in log_of(out).read_text().splitlines() if "no logged step" in line]
    assert len(named) == len(BROKEN)
    assert "metrics.jsonl, line 2:" in named[0]
    whole, found = metrics(run_of(*settings)), metrics(out)
    assert [line["step"] for line in found] == [line["step"] for line in whole]


def test_all_files_of_a_run_have_the_modes_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        directory = RunDirectory(tmp_path / "run")
        directory.best.mkdir(parents=True)
        write_model(directory.best, {"a": torch.zeros(2)}, {"config.json": "{}"})
        directory.finish({"valid": {}})
    finally:
        os.umask(before)
    files = [path for path in directory.path.rglob("*") if path.is_file()]
    assert len(files) == 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o640}


def test_results_are_read_through_a_model(tmp_path):
    directory = RunDirectory(tmp_path)
    for content, problem in {
        "": "not JSON",
        "[]": "not a JSON object",
        '{"valid": {"nll": "x"}, "steps": 1, "seconds": 1}': "valid.nll: should be a valid number",
        '{"valid": {}, "seconds": 1}': "steps: missing",
        "[" * 100_000: "not JSON",
    }.items():
        directory.results_file.write_text(content)
        with pytest.raises(RequestError) as caught:
            directory.results()
        assert str(caught.value).startswith(f"{directory.results_file}: ")
        assert problem in str(caught.value)
    directory.results_file.write_text(json.dumps({"valid": {}, "steps": 1, "seconds": 1}))
    directory.results()
