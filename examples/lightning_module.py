"""A LightningModule with LABO after a warm-up, exact under gradient accumulation.

    $ python examples/lightning_module.py
    50 optimizer steps, and the loss has counted 50
    now LABOLoss
    accuracy 0.8710  nll 0.6807

Lightning averages the means of the micro-batches. If their numbers of targets differ (the last
batch of an epoch, sentences of different lengths), some targets count more than others. Here the
loss is a sum, and the gradient is divided once by the number of targets in the optimizer step.
"""

from __future__ import annotations

import argparse

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import labo
from labo.integrations.lightning import RegularizationCallback
from labo.lab.images.digits import read_digits


class Classifier(pl.LightningModule):  # type: ignore[misc]
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.loss = loss  # its reduction is "sum"
        self.targets: Tensor | int = 0  # in this optimizer step so far

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        self.targets = self.targets + (y != -100).sum()
        total: Tensor = self.loss(self.model(x), y)
        return total

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        # Lightning has divided by the number of micro-batches, and DDP by that of processes.
        divided = self.trainer.accumulate_grad_batches * self.trainer.world_size
        targets = self.trainer.strategy.reduce(self.targets, reduce_op="sum")
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad *= divided / targets
        self.targets = 0

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        logits = self.model(x)
        self.log("accuracy", (logits.argmax(-1) == y).float().mean())
        self.log("nll", nn.functional.cross_entropy(logits, y))  # not the training loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args(arguments).epochs

    data = TensorDataset(*read_digits())
    train, valid = (torch.utils.data.Subset(data, range(*part)) for part in ((1200,), (1200, 1797)))
    pl.seed_everything(0, verbose=False)
    loss = labo.Warmup(
        labo.LabelSmoothingLoss(alpha=0.1, reduction="sum"),
        labo.LABOLoss(tau=1.25, reduction="sum"),
        steps=20,
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        accumulate_grad_batches=4,
        callbacks=[RegularizationCallback()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Classifier(loss)
    trainer.fit(module, DataLoader(train, 64, shuffle=True), DataLoader(valid, 597))
    print(f"{trainer.global_step} optimizer steps, and the loss has counted {loss.steps_done}")
    print(f"now {type(loss.active).__name__}")
    print("  ".join(f"{name} {value:.4f}" for name, value in trainer.callback_metrics.items()))


if __name__ == "__main__":
    main()
