"""Lightning: optimizer steps and epochs are counted, teachers are hidden, resuming is exact."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import labo
from scripts import load_example

pl = pytest.importorskip("lightning.pytorch")
from labo.integrations.lightning import (  # noqa: E402
    EMATeacher,
    FrozenTeacher,
    RegularizationCallback,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .* does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    # raised inside Lightning by torch 2.13
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
]


def data(rows: int = 40) -> DataLoader:
    """Five batches of eight that a linear model can learn in part."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 6, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :4].argmax(-1)), batch_size=8)


class Module(pl.LightningModule):
    def __init__(self, loss: nn.Module, teacher: FrozenTeacher | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Linear(6, 4)
        self.loss = loss
        self.teacher = EMATeacher(self.model) if teacher == "ema" else teacher
        self.seen: list[str] = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.seen.append(type(getattr(self.loss, "active", self.loss)).__name__)
        teacher_logits = () if self.teacher is None else (self.teacher(x),)
        return self.loss(self.model(x), y, *teacher_logits)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
QUIET |= {"accelerator": "cpu"}


def trainer(folder: Path, *callbacks: pl.Callback, **options) -> pl.Trainer:
    callbacks = (RegularizationCallback(), *callbacks)
    options = {"max_epochs": 1} | options
    return pl.Trainer(default_root_dir=folder, callbacks=list(callbacks), **QUIET, **options)


def warmup(steps: int) -> labo.Warmup:
    return labo.Warmup(labo.LabelSmoothingLoss(), labo.LABOLoss(), steps)


def test_warm_up_counts_optimizer_steps_not_micro_batches(tmp_path):
    module = Module(warmup(3))
    run = trainer(tmp_path, max_epochs=3, accumulate_grad_batches=3, enable_checkpointing=False)
    run.fit(module, data())
    # Five micro-batches are steps of 3 and 2: two optimizer steps per epoch. LABO from step 3 on.
    assert run.global_step == module.loss.steps_done == 6
    assert module.seen == ["LabelSmoothingLoss"] * 5 + ["LABOLoss"] * 10


def test_epochs_end_for_losses_inside_a_warm_up(tmp_path):
    ols, pskd = labo.OnlineLabelSmoothingLoss(4), labo.PSKDLoss(epochs=5)
    module = Module(labo.Warmup(ols, pskd, steps=100))
    trainer(tmp_path, max_epochs=2, enable_checkpointing=False).fit(module, data())
    assert pskd.epoch == 2
    torch.testing.assert_close(ols.table.sum(-1), torch.ones(4))
    assert not ols.sums.any()


def test_several_optimizers_by_hand_count_once_per_batch(tmp_path):
    class ByHand(Module):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self):
            return [torch.optim.SGD([p], lr=0.1) for p in self.model.parameters()], []

    module = ByHand(warmup(3))
    trainer(tmp_path, enable_checkpointing=False).fit(module, data())
    assert module.loss.steps_done == 5


def test_a_missing_loss_is_named(tmp_path):
    module = Module(warmup(3))
    module.criterion = module.loss
    del module.loss
    with pytest.raises(ValueError, match=r"Module\.loss is not a loss Module.*loss_attr"):
        trainer(tmp_path, enable_checkpointing=False).fit(module, data())


# ------------------------------------------------------------------ checkpoints


CASES = {
    "warm-up": (lambda: warmup(8), None),
    "ols": (lambda: labo.OnlineLabelSmoothingLoss(4), None),
    "kr-ls": (lambda: labo.KRLSLoss(4), None),
    "distillation": (labo.DistillationLoss, FrozenTeacher(nn.Linear(6, 4))),
    "averaged": (labo.DistillationLoss, "ema"),
}


@pytest.mark.parametrize(
    ("name", "save_on_train_epoch_end"),
    [*((name, True) for name in CASES), ("warm-up", False), ("ols", False)],
)
def test_resumed_equals_uninterrupted(name, save_on_train_epoch_end, tmp_path):
    make_loss, teacher = CASES[name]

    class Validated(Module):
        def validation_step(self, batch, batch_idx):
            x, y = batch
            nn.functional.cross_entropy(self.model(x), y)

    def saver(folder):
        return pl.callbacks.ModelCheckpoint(
            folder, save_last=True, save_on_train_epoch_end=save_on_train_epoch_end
        )

    def fit(folder, epochs, ckpt_path=None):
        module = Validated(make_loss(), teacher)
        options = {"max_epochs": epochs, "accumulate_grad_batches": 2}
        trainer(folder, saver(folder), **options).fit(module, data(), data(), ckpt_path=ckpt_path)
        return module

    straight = fit(tmp_path / "straight", 4)
    fit(tmp_path / "parts", 2)
    resumed = fit(tmp_path / "parts", 4, tmp_path / "parts" / "last.ckpt")
    ours, theirs = resumed.state_dict(), straight.state_dict()
    assert ours.keys() == theirs.keys()
    for key in theirs:
        assert torch.equal(ours[key], theirs[key]), key
    if teacher == "ema":
        assert resumed.teacher.steps == straight.teacher.steps == 12
        assert torch.equal(resumed.teacher.model.weight, straight.teacher.model.weight)


def test_resuming_with_another_loss_is_refused(tmp_path):
    run, path = trainer(tmp_path), tmp_path / "model.ckpt"
    run.fit(Module(warmup(3)), data())
    run.save_checkpoint(path)
    hotter = labo.Warmup(labo.LabelSmoothingLoss(), labo.LABOLoss(tau=2.0), 3)
    for other, message in (
        (warmup(9), "its steps is 3 and that of Warmup is 9"),
        (hotter, "its after.tau is 1.25"),
    ):
        with pytest.raises(ValueError, match=f"has the state of another loss: {message}"):
            trainer(tmp_path, max_epochs=2).fit(Module(other), data(), ckpt_path=path)


def test_nothing_is_saved_twice_and_no_teacher_is_needed_to_load(tmp_path):
    class Student(Module):
        def __init__(self):
            super().__init__(warmup(3), FrozenTeacher(nn.Linear(6, 4)))

        def training_step(self, batch, batch_idx):
            return self.loss(self.model(batch[0]), batch[1])

    run = trainer(tmp_path)
    run.fit(Student(), data())
    path = tmp_path / "model.ckpt"
    run.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    assert set(saved["state_dict"]) == {"model.weight", "model.bias", "loss._extra_state"}
    assert not [name for name in saved["callbacks"] if "Regularization" in name]
    assert "labo.teacher" not in saved
    loaded = Student.load_from_checkpoint(path, map_location="cpu", weights_only=True)
    assert loaded.loss.steps_done == 5


# ------------------------------------------------------------------ teachers


def test_a_frozen_teacher_is_hidden(tmp_path):
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5))
    before = copy.deepcopy(model.state_dict())
    module = Module(labo.DistillationLoss(), FrozenTeacher(model))
    assert {name for name, _ in module.named_parameters()} == {"model.weight", "model.bias"}
    trainer(tmp_path, max_epochs=2, enable_checkpointing=False).fit(module, data())
    assert not model.training
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


@pytest.mark.parametrize(
    ("loss", "teacher", "module"),
    [
        (lambda: warmup(3), None, "labo.losses.labo"),
        (labo.DistillationLoss, "ema", "labo.integrations.lightning"),
    ],
)
def test_what_nobody_steps_is_warned_about(loss, teacher, module, tmp_path, monkeypatch):
    """Without the callback: a warm-up that never ends, an average that never moves."""
    monkeypatch.setattr(f"{module}._PATIENCE", 20)
    fitted = Module(loss(), teacher)
    run = pl.Trainer(max_epochs=4, enable_checkpointing=False, **QUIET)
    with pytest.warns(UserWarning, match="20 training passes without a step"):
        run.fit(fitted, data())
    trainer(tmp_path, max_epochs=5, enable_checkpointing=False).fit(fitted, data())


def test_the_average_is_the_mean_until_its_decay():
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.0)
    teacher = EMATeacher(model, decay=0.75)
    means = []
    for value in (1.0, 2.0, 3.0, 8.0, 8.0):
        nn.init.constant_(model.weight, value)
        teacher.step()
        means.append(teacher.model.weight.item())
    # the means of 0 1, of 0 1 2 and of 0 1 2 3; then a quarter of the difference each time
    assert means == pytest.approx([0.5, 1.0, 1.5, 3.125, 4.34375])
    with pytest.raises(ValueError, match="decay must lie in"):
        EMATeacher(model, decay=1.0)


# ------------------------------------------------------------------ the example's normalisation


@pytest.mark.parametrize("sizes", [[40], [8, 8, 8, 8, 8], [19, 1, 20], [40, 0]])
def test_the_example_module_has_the_mean_over_all_targets(sizes):
    """One optimizer step over micro-batches of any sizes equals the step on the whole batch."""
    loss = labo.LABOLoss(reduction="sum")
    torch.manual_seed(0)
    module = load_example("lightning_module").Classifier(loss)
    model = copy.deepcopy(module.model)
    x, y = torch.randn(40, 64), torch.randint(10, (40,))
    y[::7] = -100
    parts = list(zip(x.split(sizes), y.split(sizes), strict=True))
    # One more than there are micro-batches: Lightning still divides by accumulate_grad_batches.
    options = {"accumulate_grad_batches": len(sizes) + 1, "enable_checkpointing": False}
    run = pl.Trainer(max_epochs=1, **options, **QUIET)
    run.fit(module, DataLoader(parts, batch_size=None))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    labo.LABOLoss()(model(x), y).backward()
    optimizer.step()
    for ours, theirs in zip(module.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------------ two processes


TWO_PROCESSES = """
import sys, torch, lightning.pytorch as pl
from torch.utils.data import DataLoader, TensorDataset
import labo
from labo.integrations.lightning import RegularizationCallback

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(3.0))
        self.loss = labo.OnlineLabelSmoothingLoss(4)
    def training_step(self, batch, batch_idx):
        return self.loss(self.scale * batch[0], batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

if __name__ == "__main__":
    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False,
        callbacks=[RegularizationCallback()], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    x, y = torch.load("data.pt")
    trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=6))
    if trainer.is_global_zero:
        torch.save(module.loss.table, "table.pt")
"""


def test_two_processes_gather_the_table_of_one(tmp_path):
    x = torch.randn(48, 4)
    y = x.argmax(-1)
    torch.save((x, y), tmp_path / "data.pt")
    (tmp_path / "fit.py").write_text(TWO_PROCESSES)
    command = [sys.executable, "fit.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    one = labo.OnlineLabelSmoothingLoss(4)
    one(3.0 * x, y)
    one.end_epoch()
    torch.testing.assert_close(torch.load(tmp_path / "table.pt"), one.table)
