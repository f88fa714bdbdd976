"""Checkpoints: everything a run needs to continue exactly.

:class:`RunState` is what is saved, :class:`Checkpoints` are the files. The folder
``checkpoints/step-00000100/`` holds the tensors of the state (safetensors), its counters (JSON) and
a manifest with the checksum of each file. It is written under another name and renamed when it is
complete. The newest two are kept. Nothing in a checkpoint is unpickled or executed.

Tensors that are split over processes (DTensors) are in its folder ``shards``, one file for each
process that wrote it, by ``torch.distributed.checkpoint``. They are written and read as
safetensors, in which the metadata of that library is JSON; its own format would be pickled. Any
number of processes can read them, and a checkpoint of one process can be split.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from ..._checks import is_dtensor
from ..errors import LabError
from . import checksums
from . import files as atomic

KEPT = 2
SHARDS = "shards"
_FORMAT = 1

Groups = dict[str, dict[str, Tensor]]  # group -> name -> tensor
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

    def plain(self) -> dict[str, Any]:
        """The counters, for ``state.json``."""
        counters = self.counters.model_dump(exclude={"scaler"})
        if self.accelerator.scaler is not None:
            counters["scaler"] = self.accelerator.scaler.state_dict()
        return counters

    def tensors(self) -> Groups:
        """All tensors. All processes call it."""
        return {
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

    def load(self, counters: Counters, saved: Groups) -> None:
        """Take up counters and :meth:`tensors`, perhaps of another number of processes."""
        counters = counters.model_copy(deep=True)
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


# ------------------------------------------------------------------ files


class _Manifest(atomic.Document):
    """The content of a checkpoint's ``manifest.json``."""

    format: int
    recipe: str
    sha256: dict[checksums.FileName, str]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and verified."""

    path: Path
    counters: Counters  # of the run
    tensors: Groups  # those that were not split over processes

    def groups(self, like: Like, only: str | None = None) -> Groups:
        """All tensors, or those of one group.

        A tensor is split if ``like`` gives a DTensor of its shape, else it is whole. Each process
        reads only what it keeps of the shards. Another shape than that of ``like`` is a ValueError.
        """
        groups = {
            group: {name: _split(tensor, like(group, name)) for name, tensor in named.items()}
            for group, named in self.tensors.items()
            if only in (None, group)
        }
        for key, tensor in self._shards(like, only).items():
            group, _, name = key.partition("/")
            groups.setdefault(group, {})[name] = tensor
        return groups

    def group(self, name: str) -> dict[str, Tensor]:
        """The whole tensors of one group, by name."""
        try:
            return self.groups(lambda group, name: None, only=name).get(name, {})
        except (RuntimeError, ValueError) as error:
            raise LabError(f"cannot read {self.path / SHARDS}: {error}") from error

    def _shards(self, like: Like, only: str | None) -> dict[str, Tensor]:
        """The tensors that were split over processes, by ``group/name``."""
        folder = self.path / SHARDS
        if not folder.is_dir():
            return {}
        dcp = _dcp()
        reader = dcp.HuggingFaceStorageReader(str(folder))
        try:
            metadata = reader.read_metadata().state_dict_metadata
        except Exception as error:  # of many kinds, from several libraries
            raise LabError(f"cannot read {folder}: {error}") from error
        tensors: dict[str, Tensor] = {}
        for key, about in metadata.items():
            group, _, name = key.partition("/")
            if only not in (None, group):
                continue
            wanted = like(group, name)
            if wanted is not None and is_dtensor(wanted):
                tensors[key] = torch.empty_like(wanted)
            else:
                tensors[key] = torch.empty(about.size, dtype=about.properties.dtype)
        try:
            with warnings.catch_warnings():  # that there is one process
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                dcp.load(tensors, storage_reader=reader, no_dist=True)
        except dcp.CheckpointException as error:
            raise ValueError(_reason(error)) from error
        return tensors


class Checkpoints:
    """The checkpoints of a run, of the recipe with this digest."""

    def __init__(self, folder: Path, recipe: str) -> None:
        self.folder, self.recipe = folder, recipe
        self.newest: Path | None = None  # the last one that was saved or restored

    @property
    def newest_step(self) -> int:
        return 0 if self.newest is None else _step(self.newest)

    def save(self, state: RunState) -> None:
        """Write a checkpoint; keep the newest two. All processes call it.

        The first process writes it. Of DTensors every process writes its own share. If it cannot be
        written (a full disk), the older ones are unchanged.
        """
        step, accelerator = state.counters.step, state.accelerator
        final = self.folder / f"step-{step:08d}"
        temporary = self.folder / f".{final.name}.tmp"
        main = accelerator.is_main_process
        split, whole = _separated(state.tensors())
        try:
            with atomic.explained("save", final):
                if main:
                    self.tidy()
                    temporary.mkdir(parents=True)
                shards = _write_shards(temporary / SHARDS, split, accelerator) if split else {}
                if main:
                    for group, named in whole.items():
                        atomic.write_tensors(temporary / f"{group}.safetensors", named)
                    atomic.write_json(temporary / "state.json", state.plain())
                    files = sorted(path for path in temporary.iterdir() if path.is_file())
                    sha256 = {path.name: atomic.sha256(path) for path in files} | shards
                    manifest = {"format": _FORMAT, "recipe": self.recipe, "sha256": sha256}
                    atomic.write_json(temporary / "manifest.json", manifest)
                    # Those as new as this one were found damaged when the run was resumed.
                    for path in self._paths():
                        if _step(path) >= step:
                            atomic.remove_folder(path)
                    os.replace(temporary, final)
                    atomic.flush(self.folder)
                    self.tidy()
        finally:
            if main:
                atomic.remove_folder(temporary)
        self.newest = final

    def restore(self, state: RunState, report: Callable[[str], None]) -> bool:
        """Load the newest whole checkpoint; whether there is one. All processes call it.

        The first process verifies checksums and tells the others which checkpoint it is. ``report``
        is called with a sentence for each checkpoint that cannot be used; if there are checkpoints
        and none can be used, the run cannot go on.
        """
        checkpoint: Checkpoint | None = None
        chosen: list[Path | None] = [None]
        if state.accelerator.is_main_process:
            checkpoint = next(self.usable(report), None)
            chosen = [None if checkpoint is None else checkpoint.path]
        broadcast_object_list(chosen)
        self.newest = chosen[0]
        if self.newest is None:
            if not self._paths():
                return False
            raise LabError(
                f"no checkpoint in {self.folder} can be used; remove {self.folder.parent} to start "
                "the run over"
            )
        if checkpoint is None:
            checkpoint = self._read(self.newest, verify=False)
        try:
            state.load(checkpoint.counters, checkpoint.groups(state.like()))
        except (KeyError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise LabError(
                f"{self.newest} does not fit the model of the recipe; remove it to continue from "
                "the checkpoint before it"
            ) from error
        return True

    def usable(self, report: Callable[[str], None]) -> Iterator[Checkpoint]:
        """The whole checkpoints of the recipe, newest first; ``report`` as for :meth:`restore`."""
        attempts = (self._read_or_report(path, report) for path in reversed(self._paths()))
        return (checkpoint for checkpoint in attempts if checkpoint is not None)

    def _read_or_report(self, path: Path, report: Callable[[str], None]) -> Checkpoint | None:
        try:
            return self._read(path)
        except LabError as error:
            report(f"passing over checkpoint {path}: {error}")
            return None

    def tidy(self) -> None:
        """Remove what a killed save left behind, and all but the newest two checkpoints."""
        for path in [*self.folder.glob(".step-*.tmp"), *self._paths()[:-KEPT]]:
            atomic.remove_folder(path)

    def _read(self, path: Path, *, verify: bool = True) -> Checkpoint:
        manifest = atomic.read_json(path / "manifest.json", _Manifest)
        if manifest.format != _FORMAT:
            raise LabError(f"its format {manifest.format} is not the known one ({_FORMAT})")
        if manifest.recipe != self.recipe:
            raise LabError("it belongs to another recipe")
        if verify:
            checksums.verify(path, manifest.sha256)
        shards = {name for name in manifest.sha256 if name.startswith(f"{SHARDS}/")}
        if shards != {f"{SHARDS}/{file.name}" for file in (path / SHARDS).glob("*")}:
            raise LabError(f"{path / SHARDS} has other files than its manifest lists")
        counters = atomic.read_json(path / "state.json", Counters)
        groups = [name for name in {*manifest.sha256} - shards if name.endswith(".safetensors")]
        tensors = {Path(name).stem: atomic.read_tensors(path / name) for name in groups}
        return Checkpoint(path, counters, tensors)

    def _paths(self) -> list[Path]:
        """The checkpoints of the folder, oldest first."""
        folders = [path for path in self.folder.glob("step-*") if path.is_dir()]
        steps = [path for path in folders if re.fullmatch("step-[0-9]+", path.name)]
        return sorted(steps, key=lambda path: (_step(path), path.name))


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


# ------------------------------------------------------------------ shards


def _separated(groups: Mapping[str, Mapping[str, Tensor]]) -> tuple[dict[str, Tensor], Groups]:
    """DTensors by ``group/name``, and the other tensors in their groups."""
    split: dict[str, Tensor] = {}
    whole: Groups = {}
    for group, named in groups.items():
        whole[group] = {name: tensor for name, tensor in named.items() if not is_dtensor(tensor)}
        split |= {f"{group}/{name}": tensor for name, tensor in named.items() if is_dtensor(tensor)}
    return split, whole


def _dcp() -> Any:
    """``torch.distributed.checkpoint``, which does not tell mypy what it exports."""
    from torch.distributed import checkpoint

    return checkpoint


def _split(tensor: Tensor, like: Tensor | None) -> Tensor:
    """This process's share of a tensor that it has whole, if ``like`` is a DTensor of its shape."""
    if like is None or not is_dtensor(like) or like.shape != tensor.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    share: Tensor = distribute_tensor(tensor.to(like.device), mesh, placements, src_data_rank=None)
    return share


def _write_shards(
    folder: Path, tensors: Mapping[str, Tensor], accelerator: Accelerator
) -> dict[str, str]:
    """Write DTensors, all processes together; the checksum of each file, named from ``SHARDS``."""
    dcp = _dcp()
    accelerator.wait_for_everyone()  # until the folder is there
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        dcp.save(_unshared(tensors), storage_writer=writer)
    except dcp.CheckpointException as error:
        raise OSError(_reason(error)) from error
    mine = folder.glob(f"shard-{accelerator.process_index + 1:05d}-*.safetensors")
    written: dict[str, str] = {}
    for part in gather_object([{f"{SHARDS}/{path.name}": atomic.sha256(path) for path in mine}]):
        written |= part
    if accelerator.is_main_process:
        if {path.name for path in folder.iterdir()} != {Path(name).name for name in written}:
            raise OSError(f"{folder} has files that no process wrote")
        atomic.flush(folder)
    return written


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors; those that share memory with another one (tied weights) as copies."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        address = tensor.to_local().data_ptr()  # type: ignore[attr-defined]
        separate[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return separate


def _reason(error: Any) -> str:
    """The first failure in an exception of ``torch.distributed.checkpoint``, in one line."""
    rank, (failure, _) = next(iter(sorted(error.failures.items())))
    return f"process {rank}: {str(failure).strip().partition(chr(10))[0]}"
