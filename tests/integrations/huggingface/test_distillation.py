"""TRL's DistillationTrainer with a loss of labo: no logits, TRL's own metrics."""

from __future__ import annotations

import datasets
import pytest
import torch
import trl

import labo
from labo.integrations.huggingface import regularize
from tiny_models import arguments, build
from tiny_sft import tokenizer


def make(out, *, beta=1.0, loss=None):
    """A trainer that generates, with TRL's loss or one of labo."""
    torch.manual_seed(0)
    words, student = tokenizer(), build("Llama")
    words.padding_side = "left"
    torch.manual_seed(1)
    teacher = build("Llama")
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.5)
    args = arguments(
        out,
        trl.DistillationConfig,
        beta=beta,
        max_steps=2,
        logging_strategy="steps",
        logging_steps=1,
        bf16=False,
        gradient_checkpointing=False,
        max_completion_length=6,
        seed=3,
    )
    data = datasets.Dataset.from_list([{"prompt": f"w{n} w4"} for n in range(3, 11)])
    trainer = trl.DistillationTrainer(
        model=student, teacher_model=teacher, args=args, train_dataset=data, processing_class=words
    )
    return trainer if loss is None else regularize(trainer, loss)


def logged(trainer):
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 2
    return [(entry["loss"], entry["entropy"]) for entry in steps]


def test_it_trains_as_trl_does(tmp_path):
    """Each divergence is compared with TRL's function in core/losses/test_divergences.py."""
    loss = labo.DistillationLoss(alpha=1.0, tau=1.0, divergence="jsd")
    found = logged(make(tmp_path / "ours", loss=loss))
    expected = logged(make(tmp_path / "theirs", beta=0.5))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=2e-4, rtol=1e-3)


def test_the_label_counts_with_its_weight(tmp_path):
    loss = labo.DistillationLoss(alpha=0.5, tau=1.0, divergence="reverse")
    mixed = logged(make(tmp_path / "a", loss=loss))[0][0]
    alone = logged(make(tmp_path / "b"))[0][0]
    hard = labo.DistillationLoss(alpha=0.0, tau=1.0)
    label = logged(make(tmp_path / "c", loss=hard))[0][0]
    scheduled = labo.DecoupledDistillationLoss(alpha=0.0, beta=0.0, warmup_epochs=2)
    assert logged(make(tmp_path / "d", loss=scheduled))[0][0] == pytest.approx(label, abs=3e-4)
    assert mixed == pytest.approx(0.5 * alone + 0.5 * label, abs=3e-4)


def test_refused(tmp_path):
    trainer = make(tmp_path)
    with pytest.raises(ValueError, match="teacher"):
        regularize(trainer, labo.LABOLoss())
    with pytest.raises(ValueError, match="leave teacher, metrics out"):
        regularize(trainer, labo.DistillationLoss(), teacher=build("Llama"), metrics=True)
    regularize(trainer, labo.DistillationLoss())
    with pytest.raises(ValueError, match="has a loss of labo already"):
        regularize(trainer, labo.DistillationLoss())
