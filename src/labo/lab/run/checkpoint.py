"""Checkpoints: everything a run needs to continue exactly.

``checkpoints/step-00000100/`` holds tensors (safetensors), the rest of the state (JSON) and a
manifest with the checksum of each file. It is written under another name and renamed when it is
complete. The newest two are kept. Nothing in a checkpoint is unpickled or executed.

Tensors that are split over processes (DTensors) are in its folder ``shards``, one file for each
process that wrote it, by ``torch.distributed.checkpoint``. They are written and read as
safetensors, in which the metadata of that library is JSON; its own format would be pickled. Any
number of processes can read them, and a checkpoint of one process can be split.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from pydantic import BaseModel
from torch import Tensor

from ..._checks import is_dtensor
from ..errors import LabError
from . import checksums
from . import files as atomic

KEPT = 2
SHARDS = "shards"
_FORMAT = 1

# By group and name: a tensor that is split over processes as the one that is read is to be.
Like = Callable[[str, str], Tensor | None]


class _Manifest(atomic.Document):
    """The content of a checkpoint's ``manifest.json``."""

    format: int
    recipe: str
    sha256: dict[checksums.FileName, str]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and verified.

    Attributes:
        path: its folder.
        state: the part that was saved as JSON, as an instance of the model it was read with.
        tensors: group -> name -> tensor, of those that were not split over processes.
    """

    path: Path
    state: Any
    tensors: dict[str, dict[str, Tensor]]

    def groups(self, like: Like) -> dict[str, dict[str, Tensor]]:
        """Group -> name -> tensor, of all tensors.

        A tensor is split if ``like`` gives a DTensor of its shape, else it is whole. Each process
        reads only what it keeps of the shards.

        Raises:
            ValueError: a tensor has another shape than the one of ``like``.
        """
        found = {
            group: {name: _split(tensor, like(group, name)) for name, tensor in named.items()}
            for group, named in self.tensors.items()
        }
        for (group, name), tensor in self._read_shards(like).items():
            found.setdefault(group, {})[name] = tensor
        return found

    def group(self, group: str) -> dict[str, Tensor]:
        """Name -> whole tensor, of one group.

        Raises:
            LabError: the shards cannot be read.
        """
        try:
            split = self._read_shards(lambda group, name: None, only=group)
        except (RuntimeError, ValueError) as error:
            raise LabError(f"cannot read {self.path / SHARDS}: {error}") from error
        return self.tensors.get(group, {}) | {name: tensor for (_, name), tensor in split.items()}

    def _read_shards(self, like: Like, only: str | None = None) -> dict[tuple[str, str], Tensor]:
        folder = self.path / SHARDS
        if not folder.is_dir():
            return {}
        dcp = _dcp()
        reader = dcp.HuggingFaceStorageReader(str(folder))
        try:
            metadata = reader.read_metadata().state_dict_metadata
        except Exception as error:  # of many kinds, from several libraries
            raise LabError(f"cannot read {folder}: {error}") from error
        found: dict[str, Tensor] = {}
        for key, about in metadata.items():
            if only in (None, _key(key)[0]):
                wanted = like(*_key(key))
                if wanted is not None and is_dtensor(wanted):
                    found[key] = torch.empty_like(wanted)
                else:
                    found[key] = torch.empty(about.size, dtype=about.properties.dtype)
        try:
            with warnings.catch_warnings():  # that there is one process
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                dcp.load(found, storage_reader=reader, no_dist=True)
        except dcp.CheckpointException as error:
            raise ValueError(_reason(error)) from error
        return {_key(key): tensor for key, tensor in found.items()}


def save(
    folder: Path,
    step: int,
    state: Mapping[str, Any],
    tensors: Mapping[str, Mapping[str, Tensor]],
    recipe: str,
    accelerator: Accelerator | None = None,
) -> Path:
    """Write a checkpoint; keep the newest two. All processes call it.

    The first process writes it. Of DTensors every process writes its own share.

    Args:
        folder: the run's ``checkpoints``.
        step: optimizer steps done; gives the checkpoint its name.
        state: plain values, saved as JSON.
        tensors: group -> name -> tensor; one file per group.
        recipe: the digest of the recipe it belongs to.
        accelerator: the processes; by default there is one.

    Raises:
        LabError: it could not be written (a full disk); the older ones are unchanged.
    """
    final = folder / f"step-{step:08d}"
    temporary = folder / f".step-{step:08d}.tmp"
    main = accelerator is None or accelerator.is_main_process
    split, whole = _separated(tensors)
    try:
        if main:
            tidy(folder)
            temporary.mkdir(parents=True)
        shards = {}
        if split:
            assert accelerator is not None, "DTensors belong to several processes"
            shards = _write_shards(temporary / SHARDS, split, accelerator)
        if main:
            _write_rest(temporary, state, whole, recipe, shards)
            # Those that are as new as this one were found damaged when the run was resumed.
            for path in _steps(folder):
                if int(path.name.removeprefix("step-")) >= step:
                    atomic.remove_folder(path)
            os.replace(temporary, final)
            atomic.flush(folder)
            tidy(folder)
    except OSError as error:
        raise LabError(f"cannot save {final}: {error.strerror or error}") from error
    finally:
        if main:
            atomic.remove_folder(temporary)
    return final


def _write_rest(
    folder: Path,
    state: Mapping[str, Any],
    tensors: Mapping[str, Mapping[str, Tensor]],
    recipe: str,
    shards: Mapping[str, str],
) -> None:
    """Write all but the shards, of which the checksums are given."""
    for group, named in tensors.items():
        atomic.write_tensors(folder / f"{group}.safetensors", named)
    atomic.write_json(folder / "state.json", state)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    checksums = {path.name: atomic.sha256(path) for path in files} | dict(shards)
    manifest = {"format": _FORMAT, "recipe": recipe, "sha256": checksums}
    atomic.write_json(folder / "manifest.json", manifest)


def latest(
    folder: Path,
    recipe: str,
    state: type[BaseModel],
    report: Callable[[str], None],
    accelerator: Accelerator | None = None,
) -> Checkpoint | None:
    """The newest whole checkpoint of ``recipe``; None if there is no checkpoint at all.

    Args:
        folder: the run's ``checkpoints``.
        recipe: the digest of the recipe.
        state: the model of the state.
        report: called with a sentence for each checkpoint that cannot be used.
        accelerator: the processes, which all call this; by default there is one. The first one
            verifies checksums and tells the others which checkpoint it is.

    Raises:
        LabError: there are checkpoints, and none can be used.
    """
    found: Checkpoint | None = None
    chosen: list[Path | None] = [None]
    if accelerator is None or accelerator.is_main_process:
        found = next(usable(folder, recipe, state, report), None)
        chosen = [None if found is None else found.path]
    if accelerator is not None:
        broadcast_object_list(chosen)
    if chosen[0] is None and _steps(folder):
        raise LabError(
            f"no checkpoint in {folder} can be used; remove {folder.parent} to start the run over"
        )
    if chosen[0] is None or found is not None:
        return found
    return _read(chosen[0], recipe, state, verify=False)


def usable(
    folder: Path, recipe: str, state: type[BaseModel], report: Callable[[str], None]
) -> Iterator[Checkpoint]:
    """The whole checkpoints of ``recipe``, newest first; arguments as for :func:`latest`."""
    for path in reversed(_steps(folder)):
        found = _read_or_refuse(path, recipe, state)
        if isinstance(found, Checkpoint):
            yield found
        else:
            report(f"passing over checkpoint {path}: {found}")


def tidy(folder: Path) -> None:
    """Remove what a killed save left behind, and all but the newest two checkpoints."""
    for path in [*folder.glob(".step-*.tmp"), *_steps(folder)[:-KEPT]]:
        atomic.remove_folder(path)


def _read_or_refuse(path: Path, recipe: str, state: type[BaseModel]) -> Checkpoint | LabError:
    """A checkpoint, or what is wrong with it."""
    try:
        return _read(path, recipe, state)
    except LabError as error:
        return error


def _read(path: Path, recipe: str, state: type[BaseModel], *, verify: bool = True) -> Checkpoint:
    manifest = atomic.read_json(path / "manifest.json", _Manifest)
    if manifest.format != _FORMAT:
        raise LabError(f"its format {manifest.format} is not the known one ({_FORMAT})")
    if manifest.recipe != recipe:
        raise LabError("it belongs to another recipe")
    if verify:
        checksums.verify(path, manifest.sha256)
    shards = {name for name in manifest.sha256 if name.startswith(f"{SHARDS}/")}
    if shards != {f"{SHARDS}/{file.name}" for file in (path / SHARDS).glob("*")}:
        raise LabError(f"{path / SHARDS} has other files than its manifest lists")
    content = atomic.read_json(path / "state.json", state)
    groups = [name for name in {*manifest.sha256} - shards if name.endswith(".safetensors")]
    tensors = {Path(name).stem: atomic.read_tensors(path / name) for name in groups}
    return Checkpoint(path, content, tensors)


def _steps(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    found = [path for path in folder.glob("step-*") if path.is_dir() and _step(path) is not None]
    return sorted(found, key=lambda path: (_step(path), path.name))


def _step(path: Path) -> int | None:
    number = path.name.removeprefix("step-")
    return int(number) if number.isascii() and number.isdecimal() else None


# ------------------------------------------------------------------ shards

Groups = dict[str, dict[str, Tensor]]


def _separated(tensors: Mapping[str, Mapping[str, Tensor]]) -> tuple[dict[str, Tensor], Groups]:
    """DTensors by ``group/name``, and the other tensors in their groups."""
    split: dict[str, Tensor] = {}
    whole: Groups = {}
    for group, named in tensors.items():
        whole[group] = {}
        for name, tensor in named.items():
            if is_dtensor(tensor):
                split[f"{group}/{name}"] = tensor
            else:
                whole[group][name] = tensor
    return split, whole


def _dcp() -> Any:
    """``torch.distributed.checkpoint``, which does not tell mypy what it exports."""
    from torch.distributed import checkpoint

    return checkpoint


def _key(key: str) -> tuple[str, str]:
    """Group and name."""
    group, _, name = key.partition("/")
    return group, name


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
    checksums = {f"{SHARDS}/{path.name}": atomic.sha256(path) for path in mine}
    found: dict[str, str] = {}
    for part in gather_object([checksums]):
        found |= part
    if accelerator.is_main_process:
        if {path.name for path in folder.iterdir()} != {Path(name).name for name in found}:
            raise OSError(f"{folder} has files that no process wrote")
        atomic.flush(folder)
    return found


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors; those that share memory with another one (tied weights) as copies."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        address = tensor.to_local().data_ptr()  # type: ignore[attr-defined]
        found[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return found


def _reason(error: Any) -> str:
    """The first failure in an exception of ``torch.distributed.checkpoint``, in one line."""
    rank, (failure, _) = next(iter(sorted(error.failures.items())))
    return f"process {rank}: {str(failure).strip().partition(chr(10))[0]}"
