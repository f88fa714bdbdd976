"""The loop: what it does besides lowering a loss."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch.nn import functional as F

from lab_runs import log_of, losses, metrics, outcome, train
from labo.calibration import expected_calibration_error
from labo.lab.config import Optim, known_recipes
from labo.lab.images import task as image_classification
from labo.lab.images.scores import classification_scores
from labo.lab.images.sources import ImageDataset, ImageSplit
from labo.lab.optim import learning_rate
from labo.lab.recipes import load_recipe
from labo.lab.run import progress
from labo.lab.run.checkpoint import Counters, KeptModel
from labo.lab.run.directory import RunDirectory
from labo.lab.run.progress import Display, track
from labo.lab.schedule import Schedule
from labo.lab.selection import Selection
from labo.lab.train import Trainer
from labo.lab.train import train as train_recipe
from labo.lab.translation.cldr import cldr_data


def last_line(out: Path) -> str:
    return log_of(out).read_text().splitlines()[-1]


# ------------------------------------------------------------------ when the work fails


def test_a_loss_that_is_no_number_stops_the_run_before_the_update(tmp_path):
    out = tmp_path / "run"
    settings = ["optim.lr=1e30", "optim.warmup_steps=10", "optim.warmup_from=0.01"]
    settings += ["method=base", "train.save_every=1", "train.batch_size=8"]
    assert train(out, settings) == {1}
    newest = max((out / "checkpoints").iterdir())
    line = last_line(out)
    assert line.startswith("labo: stopped before the update of step")
    assert str(newest) in line
    stop = metrics(out)[-1]
    assert stop["stopped"] in line
    assert len(stop["samples"]) == 8
    assert str(stop["samples"][0]) in line
    weights = load_file(newest / "model.safetensors")
    assert all(weight.isfinite().all() for weight in weights.values())
    assert "nan" not in (out / "metrics.jsonl").read_text().replace(stop["stopped"], "").lower()


def test_a_full_disk_destroys_nothing(run_of, tmp_path):
    settings, out = (
        ["train.epochs=3", "train.save_every=5", "train.batch_size=160"],
        tmp_path / "run",
    )
    assert train(out, settings, kill=("step", 14)) == {-signal.SIGKILL}
    before = sorted((out / "checkpoints").rglob("*"))
    assert train(out, settings, kill=("full disk", 50_000)) == {1}
    assert last_line(out).startswith("labo: cannot write")
    assert sorted((out / "checkpoints").rglob("*")) == before
    assert train(out, settings) == {0}
    assert outcome(out) == outcome(run_of(*settings))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["data.name=cifar10", "data.root=/nowhere"], "/nowhere"),
        (["method=kd", "method.teacher=/nowhere"], "/nowhere is no run"),
        (["train.precision=fp16"], "fp16 needs a GPU"),
    ],
)
def test_a_wrong_request_leaves_no_trace(settings, problem, tmp_path):
    out = tmp_path / "run"
    assert train(out, settings) == {2}
    assert problem in last_line(out)
    assert not out.exists()


# ------------------------------------------------------------------ what it shows


def test_the_header_says_what_is_trained_and_where(run_of):
    out = run_of("method.warmup_steps=9", "train.max_steps=5", "train.eval_every_steps=2")
    header = log_of(out).read_text().split("note: ")[0]
    facts = dict(line.split(maxsplit=1) for line in header.splitlines() if line)
    assert "1,294 training samples, 10 classes" in facts["data"]
    assert facts["model"].endswith(" parameters")
    results = json.loads((out / "results.json").read_text())
    assert facts["device"] == f"cpu: {results['devices'][0]}, float32"
    assert facts["device"].endswith(", 1 thread, float32")
    assert facts["method"].startswith("labo ")
    assert "warmup_steps=9" in facts["method"]
    assert facts["folder"] == str(out)
    evaluated = [line["step"] for line in metrics(out) if "valid" in line]
    assert evaluated == [2, 4, 5]
    (note,) = results["notes"]
    assert note.startswith("the warm-up of 9 steps is longer than the run of 5")


def test_the_results_name_every_device_of_the_run(tmp_path, monkeypatch):
    out, settings = tmp_path / "run", ["train.epochs=2", "train.batch_size=160"]
    assert train(out, settings, kill=("step", 12)) == {-signal.SIGKILL}
    loop = sys.modules[Trainer.__module__]
    monkeypatch.setattr(loop, "device_name", lambda device: "another processor")
    first, second = train_recipe(load_recipe("digits", settings), out)["devices"]
    assert (first.split(", ")[-1], second) == ("1 thread", "another processor")


def test_the_bar_keeps_count_and_time_in_sight():
    output = io.StringIO()
    console = Console(file=output, width=60, force_terminal=True, color_system=None)
    with Display(165_000, silent=False, console=console) as display:
        scores = dict.fromkeys(["nll", "entropy", "confidence", "token_accuracy", "bleu"], 1.0)
        display.evaluated(1000, scores, "bleu", True)
        display.advance(120_000, 9)
        display.logged(120_000, 99, 1.2345)
        with track("decoding, beam 5", 1014) as advance:
            advance(500)
            display.progress.refresh()
            shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue()).splitlines()[-2:]
    assert "120000/165000" in shown[0]
    assert ":" in shown[0].split("165000")[1]
    assert "500/1014" in shown[1]
    assert all(len(line.strip("\r")) <= 60 for line in shown)


def test_work_without_a_terminal_is_reported_now_and_then(monkeypatch):
    monkeypatch.setattr(progress, "_QUIET_SECONDS", -1.0)
    output = io.StringIO()
    with Display(10, silent=False, console=Console(file=output)), track("decoding", 8) as advance:
        advance(3)
        advance(5)
    assert output.getvalue().split("\n")[:2] == ["decoding: 3 of 8", "decoding: 8 of 8"]
    with track("not shown", 8) as advance:
        advance(3)
    assert "not shown" not in output.getvalue()


def test_a_tie_goes_to_the_better_nll_and_is_no_improvement():
    recipe = load_recipe("digits", ["train.select=accuracy"])
    counters = Counters(processes=1)
    selection = Selection(
        run=SimpleNamespace(best=None),
        task=SimpleNamespace(higher_is_better={"accuracy": True}),
        schedule=Schedule(recipe.train, 99),
        state=SimpleNamespace(counters=counters),
        parallel=None,
    )
    selection.select = lambda weights: None
    for step, nll in enumerate((2.0, 1.0, 1.5), 1):
        selection.add(KeptModel(step=step, score=0.5, nll=nll), {})
    assert (counters.best_step, counters.stale, counters.evaluated) == (2, 2, 3)


# ------------------------------------------------------------------ what a recipe can ask for


def test_a_run_of_any_length_starts_at_once(tmp_path):
    """Which steps are evaluated is computed, not listed."""
    out = tmp_path / "run"
    settings = ["train.epochs=1000000000000", "train.average_last=3", "train.batch_size=160"]
    assert train(out, settings, kill=("step", 20)) == {-signal.SIGKILL}, log_of(out).read_text()
    assert [line["epoch"] for line in metrics(out) if "valid" in line] == [1, 2]


@pytest.mark.parametrize("eval_every", [1, 3])
@pytest.mark.parametrize("total", [1, 6, 7])
@pytest.mark.parametrize("average_last", [0, 2, 5])
def test_which_steps_are_evaluated_and_averaged(eval_every, total, average_last):
    """Against the list of them."""
    settings = [f"train.eval_every={eval_every}", f"train.average_last={average_last}"]
    recipe = load_recipe("digits", [*settings, f"train.max_steps={total}"])
    schedule = Schedule(recipe.train, batches_per_epoch=3)
    assert schedule.total == total
    every = 3 * eval_every
    evaluated = sorted({*range(every, total, every), total})
    averaged = evaluated[-average_last:] if average_last else []
    steps = range(total + 1)
    assert [step for step in steps if schedule.is_evaluated(step)] == evaluated
    assert [step for step in evaluated if schedule.is_averaged(step)] == averaged


def test_early_stop(run_of):
    settings = ["optim.lr=1e-6", "train.epochs=9", "train.patience=2", "train.select=accuracy"]
    out = run_of(*settings)
    assert "no better model in 2 evaluations" in log_of(out).read_text()
    evaluations = [line for line in metrics(out) if "valid" in line]
    assert len(evaluations) < 9
    results = json.loads((out / "results.json").read_text())
    assert results["steps"] == evaluations[-1]["step"]
    assert results["selected_step"] == evaluations[-3]["step"]
    assert results["valid"] == evaluations[-3]["valid"]


def test_the_average_of_the_last_models(run_of):
    out = run_of("train.epochs=4", "train.average_last=2")
    first, last = sorted((out / "checkpoints").iterdir())
    selected = load_file(out / "best" / "model.safetensors")
    one, two = load_file(first / "model.safetensors"), load_file(last / "model.safetensors")
    for name, weight in selected.items():
        if weight.is_floating_point():
            torch.testing.assert_close(weight, (one[name] + two[name]) / 2)


def test_the_moving_average_is_evaluated_and_saved(run_of):
    settings = ["train.epochs=2", "train.batch_size=160", "train.save_every=1", "train.ema=0.6"]
    whole = run_of(*settings)
    before, last = sorted((whole / "checkpoints").iterdir())
    step = int(before.name.removeprefix("step-"))
    decay = min(0.6, (1 + step) / (10 + step))
    old, new = load_file(before / "ema.safetensors"), load_file(last / "ema.safetensors")
    weights = load_file(last / "model.safetensors")
    selected = load_file(whole / "best" / "model.safetensors")
    for name, average in new.items():
        if average.is_floating_point():
            expected = decay * old[name] + (1 - decay) * weights[name]
            torch.testing.assert_close(average, expected)
    results = json.loads((whole / "results.json").read_text())
    assert results["selected_step"] == step + 1
    assert all(torch.equal(selected[name], new[name]) for name in selected)
    assert any(not torch.equal(selected[name], weights[name]) for name in selected)
    valid = [line["valid"] for line in metrics(whole) if "valid" in line]
    assert results["valid"] == valid[-1]  # the scores in training are those of the average


VIT = ["model.name=vit-tiny", "model.patch=2", "model.width=12", "model.layers=2"]
VIT += ["model.heads=2", "model.ffn=16"]


@pytest.mark.parametrize(
    "settings",
    [
        ["data.cutmix=1.0", "data.mixup=1.0", "data.mix_probability=0.5", "optim.nesterov=true"],
        ["data.randaugment=2", "data.magnitude=12", "data.erasing=0.5", "train.ema=0.9"],
        ["train.precision=bf16", "data.padding=1", "data.flip=true", "data.rotation=15"],
        ["optim.name=adamw", "optim.lr=1e-3", "optim.clip_norm=1.0"],
        ["optim.name=adam", "optim.schedule=inverse_sqrt", "optim.warmup_steps=4", "optim.lr=1e-3"],
        [*VIT, "model.drop_path=0.2", "model.dropout=0.1", "optim.name=adamw", "optim.lr=3e-3"],
    ],
    ids=" ".join,
)
def test_options(settings, run_of, tmp_path):
    """Each trains, and resumes exactly."""
    common = ["train.epochs=2", "train.batch_size=160", "train.log_every=3", "train.save_every=4"]
    settings, out = [*common, *settings], tmp_path / "run"
    whole = run_of(*settings)
    assert losses(whole)[-1] < losses(whole)[0]
    assert train(out, settings, kill=("step", 7)) == {-signal.SIGKILL}
    assert train(out, settings) == {0}
    assert outcome(out) == outcome(whole)


def test_batches_prepared_ahead_are_the_same(run_of):
    common = ["train.epochs=2", "data.flip=true"]
    assert losses(run_of(*common, "train.workers=2")) == losses(run_of(*common))


SCHEDULE = {
    "constant": {0: 0.0, 5: 0.5, 10: 1.0, 99: 1.0},
    "cosine": {0: 0.0, 10: 1.0, 55: 0.5, 100: 0.0},
    "inverse_sqrt": {5: 0.5, 10: 1.0, 40: 0.5},
    "step": {10: 1.0, 59: 1.0, 60: 0.2, 99: 0.2 * 0.2},
}


@pytest.mark.parametrize("schedule", SCHEDULE)
def test_learning_rate(schedule):
    milestones = (6, 9) if schedule == "step" else ()
    optim = Optim(lr=1.0, schedule=schedule, warmup_steps=10, milestones=milestones, gamma=0.2)
    for step, rate in SCHEDULE[schedule].items():
        assert math.isclose(learning_rate(optim, step, step // 10, 100), rate, abs_tol=1e-12)


def test_scores_are_the_measures_of_the_core():
    torch.manual_seed(0)
    log_p = (3 * torch.randn(500, 4)).double().log_softmax(-1)
    log_p[0] = torch.tensor([0.0, -math.inf, -math.inf, -math.inf])  # a confidence of exactly 1
    labels = torch.randint(4, (500,))
    labels[0] = 0
    found = classification_scores(log_p, labels)
    assert math.isclose(found["ece"], expected_calibration_error(log_p, labels), abs_tol=1e-9)
    assert math.isclose(found["nll"], F.nll_loss(log_p, labels).item())
    assert math.isclose(found["accuracy"], (log_p.argmax(-1) == labels).double().mean().item())
    assert math.isclose(found["entropy"], -(log_p[1:].exp() * log_p[1:]).sum().item() / 500)


# ------------------------------------------------------------------ the recipes


def generated(name: str, root: str | None, **_: object) -> ImageDataset:
    """A few images of the shape of a data set."""
    size, channels, classes = {
        "digits": (8, 1, 10),
        "fashion-mnist": (28, 1, 10),
        "cifar10": (32, 3, 10),
        "cifar100": (32, 3, 100),
    }[name]
    chance = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (12, channels, size, size), generator=chance, dtype=torch.uint8)
    split = ImageSplit(pixels, torch.arange(12) % classes)
    names = tuple(map(str, range(classes)))
    return ImageDataset(split, split, split, names, (0.5,) * channels, (0.25,) * channels, name)


@pytest.fixture
def image_folder(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for part in ("train", "val"):
        for kind in ("cat", "dog"):
            folder = tmp_path / "images" / part / kind
            folder.mkdir(parents=True)
            for number in range(3):
                image.effect_noise((250 + 20 * number, 240), 50).save(folder / f"{number}.png")
    return tmp_path / "images"


IMAGE_RECIPES = [
    name for name in known_recipes() if load_recipe(name).task == "image_classification"
]
TEXT_RECIPES = [  # translation-sft, which needs a model folder, is in test_pretrained_translation
    name
    for name in known_recipes()
    if load_recipe(name).task == "translation" and load_recipe(name).model.pretrained is None
]


@pytest.mark.parametrize("name", IMAGE_RECIPES)
def test_every_recipe_for_images_takes_real_steps(name, image_folder, tmp_path, monkeypatch):
    settings = ["train.epochs=null", "train.max_steps=2", "train.batch_size=2"]
    if load_recipe(name).data.name == "folder":
        settings += [f"data.root={image_folder}", "data.holdout=0.5", "data.size=64"]
    recipe = load_recipe(name, settings)
    if recipe.data.name != "folder":
        monkeypatch.setattr(image_classification, "load_images", generated)
    results = train_recipe(recipe, tmp_path / "run")
    assert results["steps"] == 2
    assert math.isfinite(results["test"]["nll"])
    shutil.rmtree(tmp_path / "run")


@pytest.mark.parametrize("name", TEXT_RECIPES)
def test_every_recipe_for_text_takes_real_steps(name, tmp_path, monkeypatch):
    monkeypatch.setenv("LABO_CACHE", str(tmp_path))
    data = cldr_data(["de-en", "fr-en"], size=100, vocabulary=320)
    settings = ["train.epochs=null", "train.max_steps=2", "train.batch_tokens=128"]
    settings += ["decode.beam=2", "decode.max_ratio=0.5", "decode.max_extra=2"]
    settings += ["model.encoder_layers=1", "model.decoder_layers=1"]
    settings += ["data.name=prepared", f"data.path={data.path}", "data.languages=[]"]
    results = train_recipe(load_recipe(name, settings), tmp_path / "run")
    assert results["steps"] == 2
    assert math.isfinite(results["test"]["nll"])
    assert {"bleu", "bleu_fr_en"} <= results["test"].keys()
    shutil.rmtree(tmp_path / "run")


def test_a_signature_does_not_say_where_the_teacher_is(tmp_path):
    recipe = load_recipe("digits", ["method=kd", f"method.teacher={tmp_path / 'base-s0'}"])
    run = RunDirectory(tmp_path / "run")
    run.start(recipe, "digits")
    signature = run.signature(recipe, data="digits", steps=1, processes=[1])
    assert "teacher=base-s0|" in signature
    assert str(tmp_path) not in signature
