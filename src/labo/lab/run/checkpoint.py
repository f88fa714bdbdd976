"""Checkpoints: everything a run needs to continue exactly.

``checkpoints/step-00000100/`` holds tensors (safetensors), the rest of the state (JSON) and a
manifest with the checksum of each file. It is written under another name and renamed when it is
complete. The newest two are kept. Nothing in a checkpoint is unpickled or executed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from torch import Tensor

from ..errors import LabError
from . import checksums
from . import files as atomic

KEPT = 2
_FORMAT = 1


class _Manifest(atomic.Document):
    """The content of a checkpoint's ``manifest.json``."""

    format: int
    recipe: str
    sha256: dict[str, str]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and verified.

    Attributes:
        path: its folder.
        state: the part that was saved as JSON, as an instance of the model it was read with.
        tensors: group -> name -> tensor.
    """

    path: Path
    state: Any
    tensors: dict[str, dict[str, Tensor]]


def save(
    folder: Path,
    step: int,
    state: Mapping[str, Any],
    tensors: Mapping[str, Mapping[str, Tensor]],
    recipe: str,
) -> Path:
    """Write a checkpoint; keep the newest two.

    Args:
        folder: the run's ``checkpoints``.
        step: optimizer steps done; gives the checkpoint its name.
        state: plain values, saved as JSON.
        tensors: group -> name -> tensor; one file per group.
        recipe: the digest of the recipe it belongs to.

    Raises:
        LabError: it could not be written (a full disk); the older ones are unchanged.
    """
    final = folder / f"step-{step:08d}"
    temporary = folder / f".step-{step:08d}.tmp"
    try:
        tidy(folder)
        temporary.mkdir(parents=True)
        for group, named in tensors.items():
            atomic.write_tensors(temporary / f"{group}.safetensors", named)
        atomic.write_json(temporary / "state.json", state)
        files = {path.name: atomic.sha256(path) for path in sorted(temporary.iterdir())}
        manifest = {"format": _FORMAT, "recipe": recipe, "sha256": files}
        atomic.write_json(temporary / "manifest.json", manifest)
        # Those that are as new as this one were found damaged when the run was resumed.
        for path in _steps(folder):
            if int(path.name.removeprefix("step-")) >= step:
                shutil.rmtree(path)
        os.replace(temporary, final)
        atomic.flush(folder)
        tidy(folder)
    except OSError as error:
        raise LabError(f"cannot save {final}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def latest(
    folder: Path, recipe: str, state: type[BaseModel], report: Callable[[str], None]
) -> Checkpoint | None:
    """The newest whole checkpoint of ``recipe``; None if there is no checkpoint at all.

    Args:
        folder: the run's ``checkpoints``.
        recipe: the digest of the recipe.
        state: the model of the state.
        report: called with a sentence for each checkpoint that cannot be used.

    Raises:
        LabError: there are checkpoints, and none can be used.
    """
    for found in usable(folder, recipe, state, report):
        return found
    if _steps(folder):
        raise LabError(
            f"no checkpoint in {folder} can be used; remove {folder.parent} to start the run over"
        )
    return None


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
        shutil.rmtree(path)


def _read_or_refuse(path: Path, recipe: str, state: type[BaseModel]) -> Checkpoint | LabError:
    """A checkpoint, or what is wrong with it."""
    try:
        return _read(path, recipe, state)
    except LabError as error:
        return error


def _read(path: Path, recipe: str, state: type[BaseModel]) -> Checkpoint:
    manifest = atomic.read_json(path / "manifest.json", _Manifest)
    if manifest.format != _FORMAT:
        raise LabError(f"its format {manifest.format} is not the known one ({_FORMAT})")
    if manifest.recipe != recipe:
        raise LabError("it belongs to another recipe")
    checksums.verify(path, manifest.sha256)
    content = atomic.read_json(path / "state.json", state)
    groups = [name for name in manifest.sha256 if name.endswith(".safetensors")]
    tensors = {Path(name).stem: atomic.read_tensors(path / name) for name in groups}
    return Checkpoint(path, content, tensors)


def _steps(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    found = [path for path in folder.glob("step-*") if path.is_dir() and _step(path) is not None]
    return sorted(found, key=lambda path: (_step(path), path.name))


def _step(path: Path) -> int | None:
    number = path.name.removeprefix("step-")
    return int(number) if number.isascii() and number.isdecimal() else None
