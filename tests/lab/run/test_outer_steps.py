"""LABO's label held for several updates: the batches, the label, resuming, several processes."""

from __future__ import annotations

import json
import signal
from types import SimpleNamespace

import pytest
import torch

from lab_runs import log_of, losses, metrics, outcome, run, train
from labo.lab.tasks import Batch
from labo.lab.teachers import HeldOutputs
from labo.lab.text.head import Head

# No batch norm. 1293 samples in batches of 323: the last has one sample, which one of two processes
# does not get, and the micro-batches of the others are of different sizes.
RUN = ["model.name=plain", "train.batch_size=323", "train.accumulate=2", "train.log_every=1"]
RUN += ["train.epochs=null", "train.max_steps=17", "train.save_every=2"]
RUN += ["method=labo", "method.warmup_steps=2"]
# Steps 13 to 15 are the updates on the last batch; the run ends within an outer loop.
STEPS, EPOCH = "method.outer_steps=3", "method.refresh=epoch"


def test_a_batch_is_used_for_every_outer_step(run_of):
    """Without learning all updates on a batch have the loss of that batch."""
    still = [*RUN, "optim.lr=1e-12"]
    once, often = run_of(*still), run_of(*still, STEPS)
    expected = [loss for loss in losses(once) for _ in range(3)]
    # The batches of the first epoch, with and without warm-up; then that of the second.
    torch.testing.assert_close(losses(often), expected[:17], rtol=1e-6, atol=0)
    log = log_of(often).read_text()
    assert "15 steps per epoch" in log
    assert "each batch is used for 3 updates in a row, and an epoch has 15 steps" in log
    assert [line["epoch"] for line in metrics(often) if "loss" in line] == ([1] * 15 + [2] * 2)


@pytest.mark.parametrize("kind", ["logits", "states"])
def test_the_outputs_of_the_first_update_are_held(kind):
    """For each of two micro-batches, while the output layer changes."""
    weight = torch.randn(5, 3)

    def outputs():
        rows = torch.randn(2, 3, requires_grad=True)
        return Head(rows, weight, softcap=9.0) if kind == "states" else rows

    def logits(outputs):
        return outputs.logits(outputs.states) if kind == "states" else outputs

    batch = Batch(None, torch.tensor([0, 1]), torch.arange(2), 0)
    teacher = HeldOutputs(SimpleNamespace(steps_per_epoch=1), 3)
    for _ in range(2):
        first = [outputs(), outputs()]
        expected = [logits(z).detach() for z in first]
        assert [teacher(batch, z) for z in first] == [(), ()]
        for _ in range(2):
            teacher.step()
            weight += 1
            held = [logits(*teacher(batch, outputs())) for _ in range(2)]
            assert all(map(torch.equal, held, expected))
            assert not any(z.requires_grad for z in held)
        teacher.step()
    assert teacher.state_dict() == {}


@pytest.mark.parametrize(("held", "world"), [(STEPS, 1), (STEPS, 2), (EPOCH, 2)])
def test_a_run_killed_within_an_outer_loop_continues_exactly(held, world, run_of, tmp_path):
    settings, out = [*RUN, held], tmp_path / "killed"
    assert -signal.SIGKILL in train(out, settings, world, ("step", 9))
    state = json.loads((max((out / "checkpoints").iterdir()) / "state.json").read_text())
    assert state["step"] == (6 if held == STEPS else 8)
    assert train(out, settings, world) == {0}, log_of(out).read_text()
    assert outcome(out) == outcome(run_of(*settings, world=world))
    if world == 2:
        torch.testing.assert_close(losses(out), losses(run_of(*settings)), rtol=2e-5, atol=1e-6)


def test_both_at_once_are_refused(tmp_path):
    assert train(tmp_path / "run", [*RUN, STEPS, EPOCH]) == {2}
    assert "leave outer_steps at 1" in log_of(tmp_path / "run").read_text()


TEXT = ["data.size=200", "data.vocabulary=400", "model.width=16", "model.ffn=32", "model.heads=2"]
TEXT += ["model.encoder_layers=1", "model.decoder_layers=1", "model.positions=128"]
TEXT += ["train.batch_tokens=256", "train.epochs=null", "train.max_steps=6", "train.save_every=1"]
TEXT += ["train.log_every=1", "optim.warmup_steps=2", "decode.beam=1", "method=labo"]
TEXT += ["method.warmup_steps=0", STEPS]


def test_text_holds_hidden_states_and_their_output_layer(tmp_path):
    def go(name, *settings, kill=None):
        out = tmp_path / name
        arguments = ["train", "cldr", *TEXT, *settings, "--out", str(out)]
        return out, run(arguments, log_of(out), kill=kill, environment={"LABO_CACHE": str(cache)})

    cache = tmp_path / "cache"
    whole, codes = go("whole")
    assert codes == {0}, log_of(whole).read_text()
    out, codes = go("killed", kill=("step", 5))
    assert codes == {-signal.SIGKILL}
    out, codes = go("killed")
    assert codes == {0}, log_of(out).read_text()
    assert outcome(out) == outcome(whole)
    still, codes = go("still", "model.dropout=0", "optim.lr=1e-12", "optim.warmup_from=0")
    first = losses(still)
    assert codes == {0}
    torch.testing.assert_close(first[:3], [first[0]] * 3, rtol=1e-5, atol=0)
    torch.testing.assert_close(first[3:], [first[3]] * 3, rtol=1e-5, atol=0)
