"""The state of a run: one object with all that a checkpoint saves and restores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

# By group and name: a tensor that is split over processes as the one that is read is to be.
Like = Callable[[str, str], Tensor | None]


class KeptModel(BaseModel):
    """An evaluated model whose weights are kept."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    step: int = Field(ge=1)
    score: float  # that which selects
    nll: float | None


class Counters(BaseModel):
    """Where a run is, apart from its tensors: ``state.json`` of a checkpoint."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    step: int = Field(0, ge=0)  # optimizer steps done
    epoch: int = Field(0, ge=0)  # epochs done
    position: int = Field(0, ge=0)  # batches done in this epoch
    loss_sum: float = 0.0  # since the last logged line
    loss_steps: int = Field(0, ge=0)
    evaluated: int = Field(0, ge=0)  # the step of the last evaluation
    best: float | None = None  # the score of the selected model
    best_nll: float | None = None  # its NLL, which decides between equal scores
    best_step: int = Field(0, ge=0)
    stale: int = Field(0, ge=0)  # evaluations since the score was last exceeded
    averaged: int = Field(0, ge=0)  # models in the average
    kept: list[KeptModel] = []  # in the order of their steps
    seconds: float = Field(0.0, ge=0)  # spent in training, over all its starts
    earlier_processes: list[int] = []  # how many there were, before their number changed
    devices: list[str] = []  # all that the first process has worked on
    processes: int = Field(ge=1)
    scaler: dict[str, Any] | None = None  # of fp16


class RunState:
    """All that a run saves.

    ``model`` is the model itself, not what wraps it for several processes. The optimizer may also
    have the parameters of the loss, and the state of the loss can differ between processes (OLS).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: nn.Module,
        teacher: Any,  # with state_dict and load_state_dict
        accelerator: Accelerator,
    ) -> None:
        self.model, self.optimizer, self.loss, self.teacher = model, optimizer, loss, teacher
        self.accelerator = accelerator
        self.average: dict[str, Tensor] = {}  # of the last evaluated weights, if it is wanted
        self.ema: dict[str, Tensor] = {}  # the moving average of the weights, if it is wanted
        self.counters = Counters(processes=accelerator.num_processes)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """``counters`` as plain values, and groups of tensors by name. All processes call it."""
        counters = self.counters.model_dump(exclude={"scaler"})
        if self.accelerator.scaler is not None:
            counters["scaler"] = self.accelerator.scaler.state_dict()
        return {
            "counters": counters,
            "model": self.model.state_dict(),
            "optimizer": _flat(self.optimizer.state_dict()["state"]),
            "loss": {  # one row per process
                name: self.accelerator.gather(tensor.to(self.accelerator.device).unsqueeze(0))
                for name, tensor in self.loss.state_dict().items()
            },
            "teacher": self.teacher.state_dict(),
            "average": self.average,
            "ema": self.ema,
        }

    def load_state_dict(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Take up what :meth:`state_dict` gave, perhaps to another number of processes."""
        counters = Counters(**saved["counters"])
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(counters.scaler)
        self.model.load_state_dict(saved["model"])
        self.loss.load_state_dict(self._share_of_loss(saved["loss"], counters.processes))
        self.teacher.load_state_dict(dict(saved["teacher"]))
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict(
            {"state": _nested(saved["optimizer"]), "param_groups": groups}
        )
        device = self.accelerator.device
        self.average = {name: tensor.to(device) for name, tensor in saved["average"].items()}
        self.ema = {name: tensor.to(device) for name, tensor in saved["ema"].items()}
        if counters.processes != self.accelerator.num_processes:
            counters.earlier_processes.append(counters.processes)
            counters.processes = self.accelerator.num_processes
        self.counters = counters

    def _share_of_loss(self, rows: Mapping[str, Tensor], processes: int) -> dict[str, Tensor]:
        """This process's state of the loss, from those of all processes that saved it.

        If there are more or fewer now, the first one takes the sum of what adds up over them.
        """
        mine = self.accelerator.process_index
        if processes == self.accelerator.num_processes:
            return {name: row[mine] for name, row in rows.items()}
        added_up = {
            f"{prefix}.{name}".removeprefix(".")
            for prefix, module in self.loss.named_modules()
            for name in getattr(module, "per_process", ())
        }
        share = {name: row[0] for name, row in rows.items()}
        for name in added_up & share.keys():
            share[name] = rows[name].sum(0) if mine == 0 else torch.zeros_like(share[name])
        return share

    def like(self) -> Like:
        """For a saved tensor one that is split over the processes as it is to be."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        weights = self.model.state_dict()
        known = dict.fromkeys(("model", "average", "ema"), weights)
        known["teacher"] = self.teacher.state_dict()

        def like(group: str, name: str) -> Tensor | None:
            if group == "optimizer":  # named by the number of the parameter
                return parameters[int(name.partition(".")[0])]
            return known.get(group, {}).get(name)

        return like


def _flat(state: dict[int, dict[str, Any]]) -> dict[str, Tensor]:
    """An optimizer's state as named tensors."""
    return {
        f"{parameter}.{name}": torch.as_tensor(value)
        for parameter, values in state.items()
        for name, value in values.items()
        if value is not None
    }


def _nested(tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """The inverse of ``_flat``."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        parameter, name = key.split(".", 1)
        state.setdefault(int(parameter), {})[name] = tensor
    return state
