"""Checkpoints: what a run needs to go on exactly where it was.

``checkpoints/step-00000100/`` holds tensors (safetensors), the rest of the state (JSON) and a
manifest with the checksum of each file. It is written under another name and renamed when whole,
so that a checkpoint under its own name is complete; the newest two are kept. Nothing in it is
ever unpickled or run.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import LabError
from . import files as atomic

KEPT = 2
_FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read back and verified.

    Attributes:
        path: its folder.
        state: what was saved as JSON.
        tensors: group -> name -> tensor.
    """

    path: Path
    state: dict[str, Any]
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
        step: optimizer steps done, which names it.
        state: what fits in JSON.
        tensors: group -> name -> tensor; one file per group.
        recipe: the digest of the recipe it belongs to.

    Raises:
        LabError: it could not be written (a full disk); the older ones are as they were.
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
        # What is as new as this one was found damaged when the run was resumed.
        for path in _steps(folder):
            if path.name >= final.name:
                shutil.rmtree(path)
        os.replace(temporary, final)
        atomic.flush(folder)
        tidy(folder)
    except OSError as error:
        raise LabError(f"cannot save {final}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def latest(folder: Path, recipe: str, report: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that is whole and belongs to ``recipe``; None if there is none at all.

    Each one that is passed over is reported in a line.

    Raises:
        LabError: there are checkpoints, and none can be used.
    """
    steps = _steps(folder)
    for path in reversed(steps):
        found = _read(path, recipe)
        if isinstance(found, Checkpoint):
            return found
        report(f"passing over checkpoint {path}: {found}")
    if steps:
        raise LabError(f"no checkpoint in {folder} can be used; remove the run to start it over")
    return None


def tidy(folder: Path) -> None:
    """Remove what a killed save left behind, and all but the newest two checkpoints."""
    for path in [*folder.glob(".step-*.tmp"), *_steps(folder)[:-KEPT]]:
        shutil.rmtree(path)


def _read(path: Path, recipe: str) -> Checkpoint | Exception:
    """A checkpoint, or what is wrong with it."""
    try:
        return _read_verified(path, recipe)
    except (LabError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return error


def _read_verified(path: Path, recipe: str) -> Checkpoint:
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    if manifest["format"] != _FORMAT:
        raise ValueError(f"its format {manifest['format']} is not the known one ({_FORMAT})")
    if manifest["recipe"] != recipe:
        raise ValueError("it belongs to another recipe")
    for name, checksum in manifest["sha256"].items():
        if Path(name).name != name:
            raise ValueError(f"its manifest names a file elsewhere: {name}")
        if atomic.sha256(path / name) != checksum:
            raise ValueError(f"{name} is damaged (its checksum does not fit)")
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    groups = [name for name in manifest["sha256"] if name.endswith(".safetensors")]
    tensors = {Path(name).stem: atomic.read_tensors(path / name) for name in groups}
    return Checkpoint(path, state, tensors)


def _steps(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())
