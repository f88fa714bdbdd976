"""Every method trains, goes on giving the losses it gave, and survives SIGKILL at any moment."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from lab_runs import (
    IMAGE_METHODS,
    SOAK,
    Kill,
    log_of,
    losses,
    outcome,
    settings_of,
    train,
    trained_methods,
)
from labo import LOSSES
from labo.lab.config import RecipeError
from labo.lab.methods import METHODS, resolve
from labo.lab.teachers import Frozen, SecondPass, Teacher, has_dropout, held_label
from labo.smoothing import stationary_confidence, stationary_label_weight

GOLDEN = Path(__file__).parent / "golden"
WRITE = "LABO_WRITE_GOLDEN" in os.environ  # after a change that is meant to change numbers

# Two epochs and a bit, so that tables, past predictions and warm-up all come into play.
RUN = ["train.epochs=null", "train.max_steps=14", "train.batch_size=256", "train.log_every=1"]
# What a killed run must restore besides: saves inside an epoch, three evaluations.
RUN += ["train.save_every=4", "train.average_last=2", "train.keep_best=1", "train.keep_last=1"]
# Without a golden curve also accumulation, and losses that are not logged at every step.
RUN_OF_TWO = ["train.accumulate=3", "train.log_every=3", "optim.warmup_steps=5"]


def settings_for(method: str, teacher: Path, world: int = 1) -> list[str]:
    return [*RUN, *(RUN_OF_TWO if world == 2 else []), *settings_of(method, teacher)]


@pytest.mark.parametrize("method", IMAGE_METHODS)
def test_losses_are_those_of_the_golden_run(method, run_of, base_run):
    found, file = losses(run_of(*settings_for(method, base_run))), GOLDEN / f"{method}.json"
    if WRITE:
        file.write_text(json.dumps([float(f"{loss:.8g}") for loss in found]) + "\n")
    golden = json.loads(file.read_text())
    # Processors round differently. After a few steps that decides which of two nearly equal inputs
    # a max-pool takes: with AVX2 the losses of dkd differ by 1.3e-4 from those with AVX-512.
    torch.testing.assert_close(found[:2], golden[:2], rtol=5e-6, atol=0)
    torch.testing.assert_close(found, golden, rtol=5e-4, atol=0)


def random_kill(chance: random.Random, *, sure: bool) -> Kill:
    """A moment to die at; a sure one comes before the run ends, on however fast a machine."""
    most = {"step": 12, "flush": 60, "rename": 40, "remove": 6} | ({} if sure else {"time": 500})
    moment = chance.choice(list(most))
    return moment, chance.randint(1, most[moment])


def train_and_kill(out: Path, settings: list[str], world: int, chance: random.Random) -> int:
    """Start the run again and again, with a death at random each time; how often it died.

    Outside the soak test it is left alone after two deaths.
    """
    for deaths in range(100):
        kill = random_kill(chance, sure=deaths == 0) if SOAK or deaths < 2 else None
        codes = train(out, settings, world, kill)
        if codes == {0}:
            return deaths
        assert -signal.SIGKILL in codes, log_of(out).read_text()
    raise AssertionError("the run never ended")


ONE = trained_methods("image_classification")
TWO = ONE if SOAK else ["ols", "ps-kd"]


@pytest.mark.parametrize(("method", "world"), [*((m, 1) for m in ONE), *((m, 2) for m in TWO)])
def test_a_killed_run_ends_as_if_nothing_had_happened(method, world, run_of, base_run, tmp_path):
    """Bit for bit, after the same command."""
    command = settings_for(method, base_run, world)
    expected = outcome(run_of(*command, world=world))
    chance = random.Random(f"{method} {world}")
    deaths = 0
    for number in range(max(SOAK, 1)):
        out = tmp_path / f"killed{number}"
        deaths += train_and_kill(out, command, world, chance)
        assert outcome(out) == expected
    assert deaths > 0


def test_every_loss_is_a_method_of_the_same_name():
    assert set(LOSSES) - set(METHODS) == {"held-labo"}  # method=labo trains with it
    assert set(METHODS) - set(LOSSES) == {"tf-kd-self"}  # kd with another teacher


STATELESS = (Teacher, Frozen, SecondPass, held_label)
PLAIN = {n: m for n, m in METHODS.items() if not m.needs and m.teacher in STATELESS}


@pytest.mark.parametrize("method", PLAIN.values(), ids=PLAIN)
def test_methods_that_mix_labels_are_those_whose_loss_takes_them(method):
    loss, logits = method.loss(), torch.randn(4, 6)
    teacher = (logits.sin(),) if getattr(loss, "teacher_argument", None) else ()
    if method.mixes:
        assert loss(logits, logits.softmax(-1), *teacher).isfinite()
    else:
        with pytest.raises(ValueError, match="not linear in the label"):
            loss(logits, logits.softmax(-1), *teacher)


def test_r_drop_needs_dropout(tmp_path):
    """A run without dropout says so; with dropout the two passes differ."""
    assert not has_dropout(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)))
    assert has_dropout(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)))
    few = ["train.epochs=null", "train.max_steps=3", "train.log_every=1", "train.batch_size=64"]
    vit = ["model.name=vit-tiny", "model.patch=4", "model.width=8", "model.layers=2"]
    vit += ["model.heads=2", "model.ffn=16"]
    for name, settings in {
        "without": ["method.lam=1e5"],
        "dropout": ["model.dropout=0.3", "method.lam=1e5"],
        "drop_path": ["model.drop_path=0.5", "method.lam=1e5"],
    }.items():
        out = tmp_path / name
        assert train(out, [*few, *vit, "method=r-drop", *settings]) == {0}, log_of(out).read_text()
        assert ("the model has no dropout" in log_of(out).read_text()) == (name == "without")
        assert (losses(out)[0] > 3) == (name != "without")


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_method_explains_itself(method):
    assert method.summary
    assert method.reference


RUN_FACTS = dict.fromkeys(("task", "model", "accelerator", "parallel"))


def test_rescaled_labo_is_divided_by_the_label_that_it_keeps():
    hyper = resolve({"name": "labo", "rescale": True}, "image_classification")
    loss, _ = METHODS["labo"].build(hyper, {"num_classes": 10, **RUN_FACTS})
    kept = stationary_label_weight(10, tau=1.25)
    assert loss.after.multiplier == pytest.approx(1 / kept)
    with pytest.raises(ValueError, match="rescale needs tau above 1"):
        METHODS["labo"].loss(10, tau=1.0, rescale=True)


def test_the_confidence_of_a_recipe_sets_tau():
    task = "image_classification"
    hyper = resolve({"name": "labo", "confidence": 0.8}, task)
    assert hyper["tau"] is None
    assert resolve(hyper, task) == hyper  # as a run that goes on reads it
    loss, _ = METHODS["labo"].build(hyper, {"num_classes": 50, **RUN_FACTS})
    assert stationary_confidence(50, tau=loss.after.tau) == pytest.approx(0.8)
    with pytest.raises(RecipeError, match="confidence sets tau"):
        resolve({"name": "labo", "confidence": 0.8, "tau": 1.25}, task)
    plain = resolve({"name": "labo", "tau": 1.1}, task)
    assert (plain["tau"], plain["confidence"]) == (1.1, None)
